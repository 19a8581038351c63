"""HotpotQA with Qwen-type models and their own chat templates, end to end on random weights."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from transformers import AutoTokenizer

from agent_trainers.trainers.grpo import StepGRPOTrainer
from tests.agent_trainers.real_models import save_model

ID = "AgentR1/HotpotQA-v0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def train(folder, env_kwargs, config):
    trainer = StepGRPOTrainer(
        folder, functools.partial(gym.make, ID, **env_kwargs), config,
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.mark.parametrize("env_kwargs", [
    {},
    {"tool_format": "tags", "context": {"name": "budget", "tokens": 700},
     "rewards": {"format_and_answer": 1.0}},
], ids=["native", "tags"])  # fmt: skip
def test_hotpotqa_trains_end_to_end(folder, env_kwargs, hotpot_file, make_config):
    config = make_config(max_completion_length=16, num_generations=2,
                         per_device_train_batch_size=4, beta=0.001)  # fmt: skip
    # turns of random weights are cut off at 16 tokens; a minority end by themselves
    trainer = train(folder, {"data": hotpot_file, "max_episode_steps": 3} | env_kwargs, config)
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert np.isfinite(entry["loss"])
    assert entry["episodes/environment_error"] == 0
    state = trainer.trajectories["train"][0].transitions[0]
    prompt = trainer.processing_class.decode(state.prompt_ids)
    assert ('"name": "search"' in prompt) == ("tool_format" not in env_kwargs)
    assert state.messages[-1]["content"] in prompt


def test_a_hub_form_task_set_is_trained_task_by_task(folder, hotpot_file, make_config):
    config = make_config(max_steps=-1, num_train_epochs=1, max_completion_length=8,
                         num_generations=2, per_device_train_batch_size=4)  # fmt: skip
    trainer = train(folder, {"data": hotpot_file, "max_episode_steps": 2}, config)
    assert {t.task_id for t in trainer.trajectories["train"]} == {"row-a", "row-b"}
