"""One trained result per family: its small worlds, and the command without training."""

import json
from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs.data.files import write_json
from benchmarks import families
from benchmarks.families import FAMILIES
from benchmarks.grid import CommandFailedError, Grid
from benchmarks.small_worlds import write_programs


def make(name, folder=None, split="test"):
    family = FAMILIES[name]
    own = {"split": split}
    if folder is not None:
        write_programs(folder / "programs.jsonl", split, 20)
        own = {"data": str(folder / "programs.jsonl")}
    return gym.make(family.env, **{**family.kwargs, **own})


def act(env, actions):
    """Take all actions; return the questions' success and return."""
    total = 0.0
    for action in actions:
        _, reward, _, _, info = env.step(action)
        total += reward
    return info["metrics"]["success"], total


@pytest.mark.parametrize("name", ["web", "users", "code"])
def test_references_solve_unseen_tasks_of_the_small_worlds(name, tmp_path):
    env = make(name, tmp_path if name == "code" else None)
    for task in range(20):
        env.reset(options={"task": task})
        assert act(env, env.unwrapped.reference_actions())[0] == 1.0


@pytest.mark.parametrize("name", ["web", "users"])
def test_splits_share_no_question_and_no_wish(name):
    asked = []
    for split, count in (("train", 400), ("test", 200)):
        env = make(name, split=split)
        found = set()
        for task in range(count):
            question, _ = env.reset(options={"task": task})
            wish = env.unwrapped.task.data.get("wish")
            found.add(question if name == "web" else tuple(wish.values()))
        asked.append(found)
    assert asked[0].isdisjoint(asked[1])
    assert len(asked[1]) == 200


def test_a_wrong_option_earns_three_quarters():
    env = make("web")
    env.reset(options={"task": 0})
    search, item, _, finish, buy = env.unwrapped.reference_actions()
    assert act(env, [search, item, finish, buy]) == (0.0, pytest.approx(0.75))


def test_the_first_day_is_wrong_where_the_guest_changes_it():
    env = make("users")
    changed = 0
    for task in range(20):
        env.reset(options={"task": task})
        data = env.unwrapped.task.data
        is_changed = data["first_day"] != data["wish"]["day"]
        wish = {**data["wish"], "day": data["first_day"]}
        hasty = [env.unwrapped.write_call("book", **wish), env.unwrapped.write_answer("done")]
        assert act(env, hasty)[0] == float(not is_changed)
        changed += is_changed
    assert 0 < changed < 20


def test_a_program_is_repaired_after_its_test_failed(tmp_path):
    env = make("code", tmp_path)
    env.reset(options={"task": 0})
    (right, answer), write = env.unwrapped.reference_actions(), env.unwrapped.write_call
    wrong = write("run_tests", code="def nothing(x):\n    return x")
    assert act(env, [wrong, right, answer]) == (1.0, pytest.approx(1.1))


def test_the_command_trains_each_family_once_and_resumes(tmp_path, monkeypatch, capsys):
    commands = []

    def command(self, command, folder):
        commands.append(command)
        if command[0] == "python":
            return 1.0
        output = Path(command[command.index("--output_dir") + 1])
        before, after = {"success_before": 0.25, "success_before_interval": [0.2, 0.3]}, {
            "success_after": 0.75, "success_after_interval": [0.7, 0.8]
        }  # fmt: skip
        write_json(output / "results.json", {**before, **after, "env": "x"})
        return 1.0

    def command_or_failure(self, command_, folder):
        if folder.name == "web":
            raise CommandFailedError("agent-r1-train exited with 1")
        return command(self, command_, folder)

    monkeypatch.setattr(Grid, "command", command)
    arguments = ["--families", "users", "--work", str(tmp_path / "work")]
    for _ in range(2):
        families.main([*arguments, "--output", str(tmp_path)])
    assert [each[0] for each in commands] == ["python", "agent-r1-train"]
    assert "| 256 | 25.0 [20.0, 30.0] | 75.0 [70.0, 80.0] | 50 |" in capsys.readouterr().out
    written = json.loads((tmp_path / "families.json").read_text(encoding="utf-8"))
    assert written["results"]["users"]["success_after"] == 0.75
    assert (tmp_path / "families.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(Grid, "command", command_or_failure)
    more = ["--families", "web", "users", "--work", str(tmp_path / "work")]
    with pytest.raises(SystemExit):
        families.main([*more, "--output", str(tmp_path / "other")])
    printed = capsys.readouterr()
    assert "failed cells: web" in printed.err
    assert "| 75.0 [70.0, 80.0] |" in printed.out  # the others have a page


def test_no_question_of_the_programs_is_in_both_splits(tmp_path):
    questions = {}
    for split, count in (("train", 2000), ("test", 200)):
        write_programs(tmp_path / split, split, count)
        rows = map(json.loads, (tmp_path / split).read_text(encoding="utf-8").splitlines())
        questions[split] = {row["text"].partition("(x)")[0] + row["text"][-4:] for row in rows}
    assert len(questions["test"]) == 200
    assert not questions["test"] & questions["train"]


def test_an_unknown_family_is_refused_before_anything_is_computed(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        families.main(["--families", "tool", "--work", str(tmp_path / "work")])
    assert "Did you mean 'tools'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        families.main(["--num_tasks", "1", "--work", str(tmp_path / "work")])
    assert not (tmp_path / "work").exists()
