"""Sealed text reveals nothing without the data, and opens only unchanged in its place."""

import dataclasses
import hashlib
import importlib.util
import json
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.errors import DataError, MissingExtraError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.environments import DATA_PACKAGES, data_files, data_path, reads_data
from agent_leaderboard.play.episodes import Replayer, _error
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import EnvironmentRecord
from agent_leaderboard.records.results import episode_seed, read_run
from agent_leaderboard.records.sealing import MARK, MIN_BYTES, Seal, _pad, data_seal, episode_place
from agent_leaderboard.verify.verify import _check_environment
from agent_trainers.trajectory import StopReason, Trajectory
from tests.agent_leaderboard.runs import read_rows, write_config

SEAL = Seal(b"k" * 32)
YES = "<answer>yes</answer>"
TEXTS = st.lists(st.lists(st.text(max_size=300), max_size=3), min_size=1, max_size=3)


@given(texts=TEXTS, place=st.text())
def test_a_sealed_episode_opens_to_the_same_text(texts, place):
    texts[0].append("\ud800 half a character")
    closed = SEAL.close(texts, place)
    assert SEAL.open(closed, place) == texts
    assert SEAL.close(texts, place) == closed


((ONE,),) = SEAL.close([[YES]], "here")
FIRST, SECOND = SEAL.close([["a", "b"], ["c"]], "here")


@pytest.mark.parametrize(
    "forged",
    [
        [[ONE[:-4] + "AAA="]], [[ONE + "AAAA"]], [[MARK]], [[MARK + "!"]], [["yes"]],
        [FIRST], [FIRST, SECOND, []], [SECOND, FIRST], [FIRST[::-1], SECOND],
        [FIRST[:1], [FIRST[1], *SECOND]],
    ],
)  # fmt: skip
def test_sealed_text_opens_only_unchanged_and_in_its_place_and_order(forged):
    other_data = Seal(b"j" * 32)
    for seal, text, place in ((SEAL, forged, "here"), (SEAL, [FIRST, SECOND], "there"),
                              (other_data, [FIRST, SECOND], "here")):  # fmt: skip
        with pytest.raises(DataError, match="not sealed with these data for this place, or was"):
            seal.open(text, place)


def test_equal_texts_have_different_ciphertexts():
    """Within an episode, between places, and in one place if any other text differs."""
    closed = [
        SEAL.close([[YES, YES], [YES]], "here"), SEAL.close([[YES, YES], [YES]], "there"),
        SEAL.close([[YES, YES], ["no"]], "here"), SEAL.close([[YES]], "here"),
    ]  # fmt: skip
    seen = [text for episode in closed for attempt in episode for text in attempt]
    assert len(set(seen)) == len(seen)
    assert len({text[len(MARK) + 24 :] for text in seen}) == len(seen)  # after the nonce, too


def test_padding_hides_lengths_up_to_a_power_of_two():
    def size(text):
        ((closed,),) = SEAL.close([[text]], "here")
        return len(closed)

    short = [f"<answer>{x}</answer>" for x in ("no", "yes", "7", "123456", "x" * 90, "x" * 200)]
    assert len({size(text) for text in short}) == 1
    assert size("x" * MIN_BYTES) > size("")
    # four bytes of length, then a power of two
    assert [len(_pad("x" * n)) for n in (0, 252, 253, 508, 509, 1020)] == [
        256, 256, 512, 512, 1024, 1024,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"weights_sha256": {"model.safetensors": "1"}}, {"settings": {"samples": 2}},
     {"model": "trained"}, {"train": {"seed": 1}}, {"slug": "other"}],
)  # fmt: skip
def test_another_agent_at_the_same_task_is_another_place(small_run, change):
    manifest = read_run(small_run).manifest
    environment, agent = manifest.environment("hotpotqa"), manifest.agent("rules")
    where = {"task": "0", "sample": 0, "seed": 1}
    here = episode_place(environment, agent, **where)
    assert here != episode_place(environment, dataclasses.replace(agent, **change), **where)
    entered = dataclasses.replace(agent, not_played=["table"], organisation="ours")
    assert here == episode_place(environment, entered, **where)  # what merging may change
    for other in ({"task": "1"}, {"sample": 1}, {"seed": 2}):
        assert here != episode_place(environment, agent, **where | other)


def test_a_key_is_not_a_published_digest_and_depends_on_every_file(tmp_path):
    def key(*names):
        for name in names:
            (tmp_path / name).write_text(name)
        return data_seal(tuple(tmp_path / name for name in names)).key

    # three of them join to the same bytes
    keys = [key("one", "two"), key("two", "one"), key("onetwo"), key("one"), key("on", "etwo")]
    assert len({*keys, hashlib.sha256(b"one").digest()}) == 6
    with pytest.raises(DataError, match="there are no data files"):
        data_seal(())


def test_nothing_of_a_sealed_run_can_be_guessed(small_run, small_data):
    """Guessing every short answer, with every published digest as a key, matches nothing."""
    found = read_run(small_run)
    environment = found.manifest.environment("hotpotqa")
    tasks = {entry.task: entry for entry in found.tasks["hotpotqa"]}
    rows = [row for row in read_rows(small_run)[0] if row["environment"] == "hotpotqa"]
    published = json.dumps(rows) + (small_run / "tasks.json").read_text()
    published += (small_run / "manifest.json").read_text()
    data = [json.loads(row) for row in (small_data / "hotpot.jsonl").read_text().splitlines()]
    guesses = {str(row["answer"]) for row in data} | {"yes", "no", *map(str, range(50))}
    public = [Seal(b""), Seal((small_run / "manifest.json").read_bytes()), Seal(b"0" * 32)]
    public += [
        Seal(bytes.fromhex(text)) for text in set(re.findall(r"\b[0-9a-f]{64}\b", published))
    ]
    for row in rows:
        agent = found.manifest.agent(row["agent"])
        seed = episode_seed(found.manifest.protocol, row["task"], row["sample"])
        place = episode_place(environment, agent, task=tasks[row["task"]].sha256,
                              sample=row["sample"], seed=seed)  # fmt: skip
        assert all(action.startswith(MARK) for action in row["actions"])
        for answer in guesses:
            action = f"<answer> {answer} </answer>"
            assert hashlib.sha256(action.encode()).hexdigest() not in published
            assert not {seal.close([[action]], place)[0][0] for seal in public} & {*row["actions"]}
    for words in ("In which country", "Norway", "Red Harbor", "Ada Holm"):
        assert words not in published
    for row in data:
        assert str(row["question"]) not in published


def answer_yes(state):
    """Answer the same to every question."""
    return YES


def test_answers_cannot_be_counted_or_compared_across_agents_and_runs(tmp_path, small_data):
    """All agents say yes to everything, in two runs: every ciphertext is unique."""
    text = write_config(tmp_path).read_text().partition("agents:")[0]
    seen = Counter()
    for number, names in enumerate((("one", "two"), ("three", "four"))):
        kind = "tests.agent_leaderboard.test_sealing:answer_yes"
        agents = "".join(f"  - {{name: {name}, kind: {kind}}}\n" for name in names)
        config = load_configs([write_config(tmp_path, f"{text}agents:\n{agents}")])
        config = config.choose(environments=["hotpotqa"])
        found = read_run(run(config, tmp_path / str(number), data=small_data))
        manifest = found.manifest
        for name in names:
            results = found.results["hotpotqa", name]
            seen.update(action for one in results for action in one.actions)
            tasks = {entry.task: entry for entry in found.tasks["hotpotqa"]}
            replayer = Replayer(manifest.environment("hotpotqa"), manifest.agent(name),
                                manifest.protocol, small_data)  # fmt: skip
            assert {
                action
                for one in results
                for action in replayer.replay(one, tasks[one.task]).attempts[0]
            } == {YES}
    assert len(seen) == 4 * 4  # agents, episodes
    assert set(seen.values()) == {1}
    assert len(set(map(len, seen))) == 1


def test_an_error_on_a_sealed_task_is_recorded_without_its_message():
    """A message may quote the task in each of its lines."""
    stack = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f("Paris")\n'
    again = "During handling, another:\n\n"
    errors = {
        f"{stack}errors.DataError: no\nParis\nParis: is it": "errors.DataError",
        f"{stack}KeyError: 'Paris'\n\n{again}{stack}TimeoutError": "TimeoutError",
        f"At the action 'Paris':\n{stack}ValueError: {stack}": "ValueError",
        "Paris: it was": "environment_error",
    }  # fmt: skip
    for text, name in errors.items():
        failed = Trajectory(task_id="0", group_id="0", transitions=[], metrics={}, timings={},
                            stop_reason=StopReason.ENVIRONMENT_ERROR, error=text)  # fmt: skip
        assert _error(failed, SEAL) == name
        assert _error(failed, Seal()) == text.splitlines()[-1]


@pytest.mark.parametrize("name", DATA_PACKAGES)
def test_tasks_of_packages_are_sealed_by_their_files(name):
    package, _ = DATA_PACKAGES[name]
    environment = EnvironmentRecord(slug="x", id=name, num_tasks=1, contamination="")
    assert reads_data(environment)
    pytest.importorskip(package)
    files = data_files(environment, None)
    assert files
    assert all(data_path(file, None).is_file() for file in files)


def test_without_its_package_an_environment_is_not_replayed(small_run, monkeypatch):
    """As `verify` meets it: the environment says what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = read_run(small_run)
    claimed = dataclasses.replace(
        found.manifest.environment("table"), slug="bfcl", id="AgentR1/BFCL-v0", kwargs={},
        is_text_public=False,
    )  # fmt: skip
    with pytest.raises(MissingExtraError, match="and then: pip install --no-deps bfcl-eval"):
        list(_check_environment(claimed, dataclasses.replace(found, tasks={"bfcl": []}), None))
