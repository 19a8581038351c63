"""Sharded training by our Accelerate recipes: two real processes on CPU against a plain one."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_trainers import TINY_POLICY
from tests.agent_trainers.gradients import TOLERANCE, assert_same_update
from tests.agent_trainers.trainers import sharded_run
from tests.agent_trainers.two_processes import run_in_two_processes

KINDS = {"fsdp2": "FSDP", "deepspeed_zero3": "DEEPSPEED"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    output = tmp_path_factory.mktemp("plain") / "weights.pt"
    sharded_run.main("plain", output)
    return torch.load(output, weights_only=False)


@pytest.mark.parametrize("recipe", ["fsdp2", "deepspeed_zero3"])
def test_two_processes_with_a_sharded_model_give_the_weights_of_one(plain, recipe, tmp_path):
    if recipe == "deepspeed_zero3" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    run_in_two_processes(sharded_run, recipe, tmp_path / "weights.pt")
    sharded = torch.load(tmp_path / "weights.pt", weights_only=False)
    assert sharded["kind"].endswith(KINDS[recipe])
    assert sharded["is_sharded"]
    assert not plain["is_sharded"]
    assert sharded["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE, abs=TOLERANCE)
    assert sharded["success"] == plain["success"]
    start = AutoModelForCausalLM.from_pretrained(TINY_POLICY).state_dict()
    assert_same_update(start, sharded["weights"], plain["weights"])
    if recipe == "fsdp2":  # the other process stopped sampling earlier
        assert sharded["sampled"] == plain["sampled"]
