"""From branches to a value, and from a value to a search, by the commands."""

import json

import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_trainers.experimental.search import __main__ as search
from agent_trainers.experimental.search.__main__ import value_warnings
from agent_trainers.experimental.search.strategies import SEARCHES
from agent_trainers.experimental.values import __main__ as value
from agent_trainers.trajectory import load_trajectories

SHORT = ["--num_tasks", "5", "--tasks_at_once", "3", "--samples_per_task", "1",
         "--states_per_episode", "1", "--branches", "1", "--epochs", "1"]  # fmt: skip
SEARCH = ["--num_tasks", "2", "--budget_steps", "9", "--candidates", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("value") / "run"
    value.run([*SHORT, "--output_dir", str(folder)])
    return folder


def test_a_value_says_how_reliable_it_is_and_keeps_what_was_played(folder):
    measured = json.loads((folder / "value.json").read_text(encoding="utf-8"))
    assert set(measured["reliability"]) == {"states", "actions"}
    assert 0 <= measured["reliability"]["states"]["calibration_error"] <= 1
    assert sum(measured["num_examples"].values()) > 5
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    parts = sorted((folder / "branches").iterdir())
    episodes = [t for part in parts for t in load_trajectories(part)]
    assert (len(parts), measured["num_episodes"]) == (2, len(episodes)) == (2, 10)
    own = sum(len(t.transitions) - t.start for t in episodes)  # from snapshots
    assert measured["environment_steps"] == own


def test_a_value_that_was_stopped_goes_on_and_a_finished_one_is_kept(folder, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    begun = tmp_path / "begun"
    with monkeypatch.context() as patch:
        patch.setattr(value, "_train", stop)
        with pytest.raises(KeyboardInterrupt):
            value.run([*SHORT, "--output_dir", str(begun)])
    first, *rest = sorted((begun / "branches").iterdir())
    for part in rest:
        part.unlink()
    written = first.stat().st_mtime_ns
    with pytest.raises(ConfigurationError, match="seed"):
        value.run([*SHORT, "--seed", "1", "--output_dir", str(begun)])
    value.run([*SHORT, "--output_dir", str(begun)])
    assert first.stat().st_mtime_ns == written
    whole = json.loads((folder / "value.json").read_text(encoding="utf-8"))
    again = json.loads((begun / "value.json").read_text(encoding="utf-8"))
    assert again["reliability"] == whole["reliability"]
    with pytest.raises(ConfigurationError, match="contains a trained value"):
        value.run([*SHORT, "--output_dir", str(begun)])


def test_every_search_is_compared_on_the_same_tasks(folder, tmp_path, capsys):
    output = tmp_path / "search.json"
    search.run([*SEARCH, "--strategies", "all", "--value", str(folder), "--output", str(output)])
    measured = json.loads(output.read_text(encoding="utf-8"))
    assert list(measured["searches"]) == list(SEARCHES)
    for name, found in measured["searches"].items():
        assert found["num_episodes"] == 2
        assert 1 <= found["metrics"]["search_steps"] <= 9
        assert ("true rewards" in found["needs"]) == name.startswith("oracle")
    assert measured["settings"]["candidates"] == 2
    shown = capsys.readouterr().out
    assert all(name in shown for name in SEARCHES)


def test_a_value_by_which_nothing_can_be_found_is_said_to_be_one(tmp_path):
    def doubts(env="a", **errors):
        found = {"mean_squared_error": 0.2, "mean_squared_error_of_mean": 0.21} | errors
        record = {"env": env, "reliability": {"states": found, "actions": found}}
        (tmp_path / "value.json").write_text(json.dumps(record))
        return value_warnings(tmp_path, "a")

    assert value_warnings(tmp_path, "a") == doubts() == []
    assert "trained in b, not in a" in doubts("b")[0]
    (weak,) = doubts(mean_squared_error=0.22)
    assert "states and actions no better than their mean" in weak
    (tmp_path / "value.json").write_text("[]")
    assert value_warnings(tmp_path, "a") == []


def test_the_episodes_of_one_search_can_be_kept(tmp_path):
    episodes = tmp_path / "episodes.jsonl"
    search.run([*SEARCH, "--strategies", "oracle_best_of", "--trajectories", str(episodes)])
    (first, _) = load_trajectories(episodes)
    assert first.metrics["search_steps"] <= 9
    assert first.usage["calls"] >= len(first.transitions)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--strategies", "beem"], UnknownNameError, "beam"),
        (["--strategies", "beam"], ConfigurationError, r"experimental\.values"),
        (["--strategies", "vote", "--budget_steps", "0"], ConfigurationError, "budget_steps"),
        (
            ["--strategies", "vote", "sample", "--trajectories", "x.jsonl"],
            ConfigurationError,
            "one",
        ),
        (["--strategies", "beam", "--value", "nowhere"], ConfigurationError, "critic.safetensors"),
    ],
)
def test_a_search_that_cannot_be_made_says_why(arguments, error, words):
    with pytest.raises(error, match=words):
        search.run(["--num_tasks", "1", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base_url", "http://localhost:1/v1", "--model", "m"], "server"),
        (["--num_tasks", "2"], "at least 3"),
        (["--gamma", "2"], "gamma"),
    ],
)
def test_a_value_that_cannot_be_trained_says_why(arguments, words, tmp_path):
    with pytest.raises(ConfigurationError, match=words):
        value.run([*arguments, "--output_dir", str(tmp_path / "run")])


def test_an_unknown_target_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(UnknownNameError, match="success"):
        value.run(["--target", "sucess", "--output_dir", str(tmp_path / "run")])
