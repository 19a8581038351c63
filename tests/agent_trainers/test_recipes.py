"""What a model's folder says of how to train it, and of the turns that it was trained for."""

import functools
import json
import shutil

import gymnasium as gym
import pytest

from agent_trainers import TINY_POLICY
from agent_trainers.cli import evaluate
from agent_trainers.policies.local import load_policy
from agent_trainers.recipes import RECIPES, find_recipe, find_turn_length
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trajectory import load_trajectories


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY_POLICY, tmp_path / "run")


def test_the_settings_of_the_run_say_it_before_the_recipe_it_began_with(folder):
    assert find_turn_length(str(folder)) is None
    (folder / "recipe.yaml").write_text("max_completion_length: 48\n")
    assert find_turn_length(str(folder)) == (48, folder / "recipe.yaml")
    (folder / "settings.json").write_text('{"max_completion_length": 32}')
    (folder / "checkpoint-5").mkdir()
    for name in (folder, folder / "checkpoint-5"):
        assert find_turn_length(str(name)) == (32, folder / "settings.json")


def test_a_warm_start_takes_no_turns_so_the_model_it_began_with_says_it(folder, tmp_path):
    (folder / "recipe.yaml").write_text("max_completion_length: 48\n")
    warm = tmp_path / "warm"
    warm.mkdir()
    (warm / "settings.json").write_text(json.dumps({"model": str(folder)}))
    assert find_turn_length(str(warm)) == (48, folder / "recipe.yaml")
    (folder / "recipe.yaml").unlink()
    (folder / "settings.json").write_text(json.dumps({"model": str(warm)}))  # in a circle
    assert find_turn_length(str(warm)) is None


def test_training_goes_on_by_the_recipe_of_the_model_it_all_began_with(folder, tmp_path):
    assert find_recipe(None, str(folder)) == RECIPES["language_model"]
    warm = tmp_path / "warm"
    (warm / "checkpoint-5").mkdir(parents=True)
    (warm / "settings.json").write_text(json.dumps({"model": str(folder)}))
    assert find_recipe(None, str(warm)) == RECIPES["language_model"]
    (folder / "recipe.yaml").write_text("max_completion_length: 48\n")
    for name in (warm, warm / "checkpoint-5"):
        assert find_recipe(None, str(name)) == folder / "recipe.yaml"
    assert find_recipe("smollm2", str(warm)) == RECIPES["smollm2"]
    (warm / "settings.json").write_text('{"model": null}')  # the embedded policy
    assert find_recipe(None, str(warm)) == RECIPES["default"]
    assert find_recipe(None, "a/name-on-the-hub") == RECIPES["language_model"]


@pytest.mark.parametrize("value", ["{", "[1]", '"many"', "0", "true", "\xff"])
def test_files_of_others_say_nothing(folder, value):
    text = value if value in ("{", "[1]", "\xff") else f'{{"max_completion_length": {value}}}'
    (folder / "settings.json").write_bytes(text.encode("latin-1"))
    assert find_turn_length(str(folder)) is None
    assert find_turn_length("a/name-on-the-hub") is None


def test_a_trained_model_is_measured_with_the_turns_it_was_trained_with(folder, tmp_path, capsys):
    (folder / "settings.json").write_text('{"max_completion_length": 3}')
    output, episodes = tmp_path / "measured.json", tmp_path / "episodes.jsonl"
    play = ["--model", str(folder), "--num_tasks", "2", "--output", str(output), "--trajectories",
            str(episodes)]  # fmt: skip
    evaluate.run(play)
    assert f"3 tokens, as in training ({folder / 'settings.json'})" in capsys.readouterr().err
    assert json.loads(output.read_text())["max_completion_length"] == 3
    assert all(max(t.lengths) <= 3 for t in load_trajectories(episodes))
    evaluate.run([*play, "--max_completion_length", "24"])
    assert max(max(t.lengths) for t in load_trajectories(episodes)) > 3


def test_a_policy_that_is_loaded_from_a_folder_takes_the_same_turns(folder):
    (folder / "settings.json").write_text('{"max_completion_length": 2}')
    make_env = functools.partial(gym.make, "AgentR1/SyntheticMultiHop-v0")
    (played,) = evaluate_policy(make_env, load_policy(str(folder)), [0]).trajectories
    assert max(played.lengths) <= 2
