import json
import sys
from dataclasses import replace

import gymnasium as gym
import pytest

from agent_trainers.cli.arguments import run_command
from agent_trainers.experimental.diagnose.__main__ import PROGRAM
from agent_trainers.experimental.diagnose.__main__ import run as diagnose
from agent_trainers.trajectory import load_trajectories, save_trajectories
from benchmarks.planted_mistakes import CASES, plant_all, report
from tests.agent_trainers.experimental.test_diagnosis import Corridor, play

ENV = ("--env", "tests.agent_trainers.experimental.test_diagnose:Corridor-v0")


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A file with a success and two failures, and its environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        sys.modules, "tests.agent_trainers.experimental.test_diagnose", sys.modules[__name__]
    )
    gym.register("Corridor-v0", Corridor, disable_env_checker=True, order_enforce=False)
    first = play(["on", "pit", "on", "on", "on", "on"])
    won = replace(first, metrics={"success": 1.0})
    second = play(["wait", "wait", "pit<script>", "pit", "on", "on"], task=5)
    save_trajectories("lost.jsonl", [won, first, second])
    yield tmp_path
    gym.registry.pop("Corridor-v0")


def run(capsys, *arguments):
    diagnose(list(arguments))
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        run_command(PROGRAM, diagnose, list(arguments))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def test_failed_episodes_are_named_in_table_figures_and_page(lost, capsys):
    shown = run(capsys, "lost.jsonl", *ENV)
    assert "2 of 6" in shown
    assert "4 of 6" in shown
    figures = json.loads((lost / "lost.diagnosis.json").read_text())
    named = [(e["row"], e["lost_step"], e["drop"]) for e in figures["episodes"]]
    assert named == [(2, 2, [1.0, 1.0, 1.0]), (3, 4, [1.0, 1.0, 1.0])]
    assert figures["environment_steps"] > 0
    steps = figures["episodes"][0]["steps"]
    assert [(s["step"], s["action"], s["chance"]) for s in steps[:3]] == [
        (1, "on", 1.0), (2, "pit", 1.0), (3, "on", 0.0)
    ]  # fmt: skip
    page = (lost / "lost.diagnosis.html").read_text()
    for link, target in (('href="#s0-2"', 'id="s0-2"'), ('href="#s1-4"', 'id="s1-4"')):
        assert link in page
        assert target in page
    assert page.count("this step lost it") == 2
    assert "What wins from here: 3 steps" in page
    assert "<script" not in page


def test_a_file_can_be_looked_at_in_part_and_written_elsewhere(lost, capsys):
    run(capsys, "lost.jsonl", *ENV, "--num_episodes", "1", "--output", "a.json", "--page", "b.html")
    assert len(json.loads((lost / "a.json").read_text())["episodes"]) == 1
    assert "row 2" in (lost / "b.html").read_text()
    assert not (lost / "lost.diagnosis.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("", "contains no episodes"),
        ("{oops", "row 1: is not valid JSON"),
        ('{"task_id": "1"}', "row 1: not a trajectory (KeyError: 'transitions')"),
    ],
)
def test_a_bad_file_is_named_with_its_row(lost, capsys, content, message):
    if content is not None:
        (lost / "bad.jsonl").write_text(content)
    assert message in refusal(capsys, "bad.jsonl", *ENV)


@pytest.mark.parametrize(
    ("field", "value"), [("metrics", None), ("seed", "7"), ("messages", None), ("action", 3)]
)
def test_a_field_of_the_wrong_kind_is_named_with_its_row(lost, capsys, field, value):
    rows = [json.loads(line) for line in (lost / "lost.jsonl").read_text().splitlines()]
    place = rows[1] if field in rows[1] else rows[1]["transitions"][2]
    place[field] = value
    (lost / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"bad.jsonl, row 2: field {field!r} is not as" in refusal(capsys, "bad.jsonl", *ENV)


def test_an_episode_of_an_unknown_task_is_named_with_its_row(lost, capsys):
    save_trajectories("old.jsonl", [replace(play(["pit"] * 6), seed=None, task_id="of another")])
    message = refusal(capsys, "old.jsonl", *ENV)
    assert "old.jsonl, row 1: task 'of another': the file has no seed" in message
    unknown, known = load_trajectories("old.jsonl")[0], load_trajectories("lost.jsonl")[1]
    save_trajectories("mixed.v2.jsonl", [unknown, known])
    assert "2 of 6" in run(capsys, "mixed.v2.jsonl", *ENV)
    figures = json.loads((lost / "mixed.v2.diagnosis.json").read_text())["episodes"]
    assert [e["lost_step"] for e in figures] == [None, 2]
    assert "'of another'" in figures[0]["note"]


def test_files_that_say_nothing_of_failures_are_refused(lost, capsys):
    won = replace(play(["pit"] * 6), metrics={"success": 1.0})
    save_trajectories("won.jsonl", [won])
    assert "none of the 1 episodes failed" in refusal(capsys, "won.jsonl", *ENV)
    save_trajectories("unmeasured.jsonl", [replace(won, metrics={"score": 0.0})])
    message = refusal(capsys, "unmeasured.jsonl", *ENV)
    assert "row 1: the episode's metrics have no 'success' (found: score)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Pass a file of episodes"),
        (("lost.jsonl", "--by", "oracel"), "Did you mean 'oracle'"),
        (("lost.jsonl", "--model", "x"), "--model and --base_url need --by model"),
        (("lost.jsonl", "--k", "0"), "--k must be at least 1"),
        (("lost.jsonl", "--output", "."), "is a folder"),
    ],
)
def test_wrong_options_are_refused(lost, capsys, arguments, message):
    assert message in refusal(capsys, *arguments, *ENV)


def test_episodes_of_another_environment_are_refused_by_name(lost, capsys):
    with pytest.raises(SystemExit) as exit_:
        run_command(PROGRAM, diagnose, ["lost.jsonl", "--env", "AgentR1/SyntheticTable-v0"])
    assert exit_.value.code
    assert "SyntheticTableEnv, task" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(CASES)[:3])  # the command line's takes a sandbox and seconds
def test_planted_mistakes_are_named(name):
    import functools

    import numpy as np

    from agent_trainers.experimental.diagnose.oracle import diagnose_by_oracle

    case = CASES[name]
    planted = plant_all(case, 3, np.random.default_rng(1))
    found = diagnose_by_oracle(
        functools.partial(gym.make, case.env, **case.kwargs), [p.trajectory for p in planted]
    ).episodes
    assert [d.lost_step for d in found] == [p.step for p in planted]


def test_the_table_of_planted_mistakes_counts_them_all():
    text = report({"a": [True] * 9 + [False], "b": [True] * 10})
    # Wilson: 19 of 20 is 76.4 to 99.1 %
    assert "| **all** | 20 | 19 | 95.0 % | 76.4 to 99.1 % |" in text
