"""Sharded training by our Accelerate recipes: two real processes on CPU against a plain one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from agent_envs import UnknownNameError
from agent_trainers import TINY_POLICY
from agent_trainers.recipes import ACCELERATE_CONFIGS, find_settings

SCRIPT = Path(__file__).parent / "sharded_run.py"
KINDS = {
    "ddp": "MULTI_GPU",
    "fsdp2": "FSDP",
    "deepspeed_zero3": "DEEPSPEED",
}


def train(recipe, output, num_processes):
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(num_processes)]
    result = subprocess.run(
        [*launcher, str(SCRIPT), recipe, str(output)],
        capture_output=True, text=True, timeout=250, cwd=SCRIPT.parents[2], check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train("plain", tmp_path_factory.mktemp("plain") / "weights.pt", 1)


@pytest.mark.parametrize("recipe", ["fsdp2", "deepspeed_zero3"])
def test_two_processes_with_a_sharded_model_give_the_weights_of_one(plain, recipe, tmp_path):
    if recipe == "deepspeed_zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    sharded = train(recipe, tmp_path / "weights.pt", 2)
    assert sharded["kind"].endswith(KINDS[recipe])
    assert sharded["is_sharded"]
    assert not plain["is_sharded"]
    assert sharded["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert sharded["success"] == plain["success"]
    start = AutoModelForCausalLM.from_pretrained(TINY_POLICY).state_dict()
    assert max((w - start[name]).abs().max() for name, w in plain["weights"].items()) > 1e-4
    for name, weight in plain["weights"].items():
        assert torch.allclose(weight, sharded["weights"][name], atol=1e-6), name
    if recipe == "fsdp2":  # the other process stopped sampling earlier
        assert sharded["sampled"] == plain["sampled"]


def test_every_recipe_says_what_was_run_and_what_was_not():
    assert set(ACCELERATE_CONFIGS) == set(KINDS)
    for name, path in ACCELERATE_CONFIGS.items():
        text = path.read_text(encoding="utf-8")
        head = text.split("compute_environment")[0]
        assert "Run by us:" in head
        assert "Not run by us:" in head
        assert f"--accelerate_config {name}" in head
        assert yaml.safe_load(text)["distributed_type"] == KINDS[name]


def test_a_mistyped_recipe_gets_the_nearest_right_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'fsdp2'"):
        find_settings(ACCELERATE_CONFIGS, "fsdp", kind="--accelerate_config")
