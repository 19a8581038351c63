"""What a published run says of licensed tasks: nothing, to who lacks the data."""

import dataclasses
import hashlib
import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.errors import DataError, MissingExtraError
from agent_leaderboard.play.config import EnvironmentConfig, load_configs
from agent_leaderboard.play.data_files import IN_PACKAGES, data_files, data_path, reads_data
from agent_leaderboard.play.episodes import _fault
from agent_leaderboard.play.replay import Replayer
from agent_leaderboard.play.run import run
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.records.sealing import LEAST, MARK, Seal, data_seal, episode_place
from agent_leaderboard.verify.environment_check import check_environment
from agent_trainers.trajectory import StopReason, Trajectory
from tests.agent_leaderboard.small_config import write_config

SEAL = Seal(b"k" * 32)
BFCL = """
protocol: {seed: 5}
environments:
  - {id: AgentR1/BFCL-v0, tasks: 2, optional: true, contamination: public}
  - {id: AgentR1/SyntheticTable-v0, name: table, tasks: 1, contamination: none}
agents: [{name: rules, kind: heuristic}]
"""
YES = "<answer>yes</answer>"
TEXTS = st.lists(st.lists(st.text(max_size=300), max_size=3), min_size=1, max_size=3)


@given(texts=TEXTS, place=st.text())
def test_a_sealed_episode_opens_again_to_the_same(texts, place):
    texts[0].append("\ud800 half a character")
    closed = SEAL.close(texts, place)
    assert SEAL.open(closed, place) == texts
    assert SEAL.close(texts, place) == closed


def test_a_seal_opens_with_its_own_data_only_and_not_once_changed():
    ((closed,),) = SEAL.close([[YES]], "here")
    for text in (closed[:-4] + "AAA=", MARK, "yes", closed + "AAAA", MARK + "!"):
        with pytest.raises(DataError, match="not sealed with these data for this place, or was"):
            SEAL.open([[text]], "here")
    with pytest.raises(DataError, match="not sealed with these data"):
        Seal(b"j" * 32).open([[closed]], "here")


def test_what_was_sealed_opens_at_its_place_and_in_its_order_only():
    first, second = SEAL.close([["a", "b"], ["c"]], "here")
    for moved in ([first], [first, second, []], [second, first], [first[::-1], second],
                  [first[:1], [first[1], *second]]):  # fmt: skip
        with pytest.raises(DataError, match="for this place"):
            SEAL.open(moved, "here")
    with pytest.raises(DataError, match="for this place"):
        SEAL.open([first, second], "there")


def test_equal_texts_look_nothing_alike():
    """Within an episode, between places, and at one place where anything else was written."""
    closed = [
        SEAL.close([[YES, YES], [YES]], "here"), SEAL.close([[YES, YES], [YES]], "there"),
        SEAL.close([[YES, YES], ["no"]], "here"), SEAL.close([[YES]], "here"),
    ]  # fmt: skip
    seen = [text for episode in closed for attempt in episode for text in attempt]
    assert len(set(seen)) == len(seen)
    streams = {text[len(MARK) + 24 :] for text in seen}  # what follows the tag, too
    assert len(streams) == len(seen)


def test_length_does_not_tell_short_answers_apart_and_of_long_ones_the_power_of_two():
    def size(text):
        ((closed,),) = SEAL.close([[text]], "here")
        return len(closed)

    short = [f"<answer>{x}</answer>" for x in ("no", "yes", "7", "123456", "x" * 90, "x" * 200)]
    assert len({size(text) for text in short}) == 1
    assert size("x" * LEAST) > size("")
    assert len({size("x" * n) for n in range(LEAST, 8 * LEAST, 7)}) == 3


@pytest.mark.parametrize(
    "change",
    [{"weights_sha256": {"model.safetensors": "1"}}, {"settings": {"samples": 2}},
     {"model": "trained"}, {"train": {"seed": 1}}, {"slug": "other"}],
)  # fmt: skip
def test_another_agent_at_the_same_task_is_another_place(small_run, change):
    manifest = RunFolder(small_run).read_manifest()
    environment, agent = manifest.environment("hotpotqa"), manifest.agent("rules")
    where = {"task": "0", "sample": 0, "seed": 1}
    here = episode_place(environment, agent, **where)
    assert here != episode_place(environment, dataclasses.replace(agent, **change), **where)
    entered = dataclasses.replace(agent, not_played=["table"], organisation="ours")
    assert here == episode_place(environment, entered, **where)  # what merging may change
    for other in ({"task": "1"}, {"sample": 1}, {"seed": 2}):
        assert here != episode_place(environment, agent, **where | other)


def test_a_key_is_not_the_digest_that_manifests_publish(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "?", "answer": "yes"}\n')
    seal = data_seal([path])
    assert seal.key != hashlib.sha256(path.read_bytes()).digest()
    assert data_seal([path]) == seal
    path.write_text('{"question": "?", "answer": "no"}\n')
    assert data_seal([path]) != seal


def test_nothing_of_a_sealed_run_can_be_guessed(small_run, small_data):
    """An attacker who guesses every short answer, and knows how digests are made, matches none."""
    folder = RunFolder(small_run)
    manifest = folder.read_manifest()
    agents = ("random", "rules", "oracle")
    lines = [line for agent in agents for line in folder.read_results("hotpotqa", agent)]
    published = "".join(path.read_text() for path in small_run.glob("*/hotpotqa*/*"))
    published += (small_run / "manifest.json").read_text()
    rows = [json.loads(row) for row in (small_data / "hotpot.jsonl").read_text().splitlines()]
    guesses = {str(row["answer"]) for row in rows} | {"yes", "no", *map(str, range(100))}
    public = [Seal(b""), Seal(folder.manifest_path.read_bytes()), Seal(b"0" * 32)]
    public += [
        Seal(bytes.fromhex(text)) for text in set(re.findall(r"\b[0-9a-f]{64}\b", published))
    ]
    for line in lines:
        environment, agent = manifest.environment("hotpotqa"), manifest.agent(line.agent)
        place = episode_place(
            environment, agent, task=line.task_sha256, sample=line.sample, seed=line.seed
        )
        assert all(action.startswith(MARK) for action in line.actions)
        for answer in guesses:
            action = f"<answer> {answer} </answer>"
            assert hashlib.sha256(action.encode()).hexdigest() not in published
            assert not {seal.close([[action]], place)[0][0] for seal in public} & {*line.actions}
    for row in rows:
        assert str(row["question"]) not in published


CONSTANT = """
agents:
  - {name: NAME, kind: tests.agent_leaderboard.test_sealing:answer_yes}
"""


def answer_yes(state):
    """Answer the same to every question."""
    return YES


def test_answers_cannot_be_counted_or_compared_across_agents_and_runs(tmp_path, small_data):
    """Everybody says yes to everything, in two runs: every ciphertext is there once."""
    text = write_config(tmp_path).read_text().partition("agents:")[0]
    seen = Counter()
    for number, names in enumerate((("one", "two"), ("three", "four"))):
        agents = "".join(CONSTANT.partition("agents:\n")[2].replace("NAME", n) for n in names)
        config = write_config(tmp_path, text + "agents:\n" + agents.replace("\n\n", "\n"))
        made = run(load_configs([config]).choose(environments=["hotpotqa"]),
                   tmp_path / str(number), data=small_data)  # fmt: skip
        for name in names:
            lines = made.read_results("hotpotqa", name)
            seen.update(action for line in lines for action in line.actions)
            manifest = made.read_manifest()
            replayer = Replayer(manifest.environment("hotpotqa"), manifest.agent(name), small_data)
            assert {opened for line in lines for opened in replayer.open(line)[0]} == {YES}
    assert len(seen) == 4 * 4  # agents, episodes
    assert set(seen.values()) == {1}
    assert len(set(map(len, seen))) == 1


def test_a_fault_on_a_sealed_task_is_named_without_its_message():
    """A message may have several lines, and quote the task in each."""
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f("Paris")\n'
    again = "During handling, another:\n\n"
    errors = {
        f"{stack}errors.DataError: no\nParis\nParis: is it": "errors.DataError",
        f"{stack}KeyError: 'Paris'\n\n{again}{stack}TimeoutError": "TimeoutError",
        f"At the action 'Paris':\n{stack}ValueError: {stack}": "ValueError",
        "Paris": "environment_error",
        "Paris: it was": "environment_error",
    }  # fmt: skip
    for text, name in errors.items():
        failed = Trajectory(task_id="0", group_id="0", transitions=[], metrics={}, timings={},
                            stop_reason=StopReason.ENVIRONMENT_ERROR, error=text)  # fmt: skip
        assert _fault(failed, SEAL) == name
        assert _fault(failed, Seal()) == text.splitlines()[-1]


def test_public_text_stays_as_it_is():
    assert Seal().open(Seal().close([["as it is"]], ""), "") == [["as it is"]]
    assert Seal().digest("x") == hashlib.sha256(b"x").hexdigest()


def test_without_data_files_there_is_no_key_that_others_lack():
    with pytest.raises(DataError, match="there are no data files"):
        data_seal([])


def test_the_order_in_which_settings_name_files_changes_no_seal(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    orders = ({"data": "${data}/c", "corpus": ["${data}/a", "${data}/b"]},
              {"corpus": ["${data}/b", "${data}/a"], "data": "${data}/c"})  # fmt: skip
    found = [
        data_files(
            EnvironmentConfig(id="AgentR1/HotpotQA-v0", kwargs=one, contamination=""), tmp_path
        )
        for one in orders
    ]
    assert found == [["a", "b", "c"]] * 2


@pytest.mark.parametrize("name", IN_PACKAGES)
def test_what_packages_bring_is_sealed_by_their_files(name):
    package, _ = IN_PACKAGES[name]
    environment = EnvironmentConfig(id=name, contamination="")
    assert reads_data(environment)
    pytest.importorskip(package)
    files = data_files(environment, None)
    assert files
    assert all(data_path(file, None).is_file() for file in files)


def test_no_package_but_those_is_looked_for(tmp_path):
    assert data_path("package:json/tool.py", tmp_path) == tmp_path / "package:json/tool.py"


def test_what_a_missing_package_brings_is_left_out_and_is_not_replayed(tmp_path, monkeypatch):
    """As `verify` meets it: the environment says what to install."""
    from agent_envs.envs.functions import bfcl

    monkeypatch.setattr(bfcl.importlib.util, "find_spec", lambda name: None)
    config = write_config(tmp_path, BFCL)
    made = run(load_configs([config]), tmp_path / "run")
    assert [one.slug for one in made.read_manifest().environments] == ["table"]
    (left_out,) = made.read_manifest().left_out
    assert "pip install --no-deps bfcl-eval" in left_out.reason
    manifest = made.read_manifest()
    table = manifest.environment("table")
    claimed = dataclasses.replace(
        table, slug="bfcl", tasks_path="tasks/bfcl.json", id="AgentR1/BFCL-v0", kwargs={},
        is_text_public=False,
    )  # fmt: skip
    with pytest.raises(MissingExtraError, match="needs bfcl-eval"):
        check_environment(claimed, manifest.protocol, made.read_tasks("table"), None)
