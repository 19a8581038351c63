"""The recipe and the turn length that a model's folder records."""

import functools
import json
import shutil

import gymnasium as gym
import pytest

from agent_envs.errors import ConfigurationError
from agent_trainers import TINY_POLICY
from agent_trainers.cli import evaluate
from agent_trainers.policies.local import load_policy
from agent_trainers.recipes import RECIPES, find_environment, find_recipe, find_turn_length
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trajectory import load_trajectories


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY_POLICY, tmp_path / "run")


def test_the_turn_length_is_that_of_the_run_or_of_the_model_it_began_with(folder, tmp_path):
    assert find_turn_length(str(folder)) is None
    (folder / "recipe.yaml").write_text("max_completion_length: 48\n")
    assert find_turn_length(str(folder)) == (48, folder / "recipe.yaml")
    warm = tmp_path / "warm"  # a warm start samples no turns
    warm.mkdir()
    (warm / "settings.json").write_text(json.dumps({"model": str(folder)}))
    assert find_turn_length(str(warm)) == (48, folder / "recipe.yaml")
    (folder / "settings.json").write_text('{"max_completion_length": 32}')
    (folder / "checkpoint-5").mkdir()
    for name in (folder, folder / "checkpoint-5"):
        assert find_turn_length(str(name)) == (32, folder / "settings.json")
    (folder / "recipe.yaml").unlink()
    (folder / "settings.json").write_text(json.dumps({"model": str(warm)}))  # a cycle
    assert find_turn_length(str(warm)) is None


def test_the_recipe_is_that_of_the_model_a_run_began_with(folder, tmp_path):
    assert find_recipe(None) == RECIPES["default"]
    assert find_recipe("a/name-on-the-hub") == RECIPES["language_model"]
    warm = tmp_path / "warm"
    (warm / "checkpoint-5").mkdir(parents=True)
    (warm / "settings.json").write_text(json.dumps({"model": str(folder)}))
    assert find_recipe(str(warm)) == RECIPES["language_model"]
    (folder / "recipe.yaml").write_text("max_completion_length: 48\n")
    for name in (warm, warm / "checkpoint-5"):
        assert find_recipe(str(name)) == folder / "recipe.yaml"
    (warm / "settings.json").write_text('{"model": null}')  # the embedded policy
    assert find_recipe(str(warm)) == RECIPES["default"]


def test_settings_of_other_programs_are_ignored(folder):
    (folder / "settings.json").write_text('{"max_completion_length": true}')
    assert find_turn_length(str(folder)) is None


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[1]", b""])
def test_a_damaged_settings_file_is_refused(folder, text):
    (folder / "settings.json").write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"run/settings.json: is no file of settings \("):
        find_environment(str(folder))


def test_a_trained_model_is_evaluated_with_the_turn_length_of_its_training(
    folder, tmp_path, capsys
):
    (folder / "settings.json").write_text('{"max_completion_length": 3}')
    output, episodes = tmp_path / "measured.json", tmp_path / "episodes.jsonl"
    evaluate.run(["--model", str(folder), "--num_tasks", "2", "--output", str(output),
                  "--trajectories", str(episodes)])  # fmt: skip
    assert f"3 tokens, as in training ({folder / 'settings.json'})" in capsys.readouterr().err
    assert json.loads(output.read_text())["max_completion_length"] == 3
    assert all(max(t.lengths) <= 3 for t in load_trajectories(episodes))
    make_env = functools.partial(gym.make, "AgentR1/SyntheticMultiHop-v0")
    (trajectory,) = evaluate_policy(make_env, load_policy(str(folder)), [0]).trajectories
    assert max(trajectory.lengths) <= 3
