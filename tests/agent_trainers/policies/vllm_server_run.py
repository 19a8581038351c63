"""Train against a fake vLLM server and save the results; started with torchrun."""

import contextlib
import os
import sys

import gymnasium as gym
import torch
from accelerate.utils import broadcast_object_list, gather_object
from transformers import AutoTokenizer

from agent_trainers import TINY_POLICY
from agent_trainers.cli.launch import leave_process_group
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from tests.agent_trainers.short_run import SETTINGS
from tests.agent_trainers.vllm_stand_in import VLLMStandIn, serving, vllm_at_hand

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))


class TurnsByTask(gym.Wrapper):
    """Cuts episodes off after 1 to 4 turns, as the task has it, so that groups differ in length."""

    is_immediate = True  # no thread, so that what is asked together does not hang on the clock

    def reset(self, *, seed=None, options=None):
        self._turns_left = 1 + (options or {"task": 0})["task"] % 4
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._turns_left -= 1
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated or self._turns_left == 0, info


def make_env():
    return TurnsByTask(gym.make("AgentR1/SyntheticMultiHop-v0"))


def main(output):
    tokenizer = AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left")
    is_main = int(os.environ.get("RANK", 0)) == 0
    stand_in = VLLMStandIn(TINY_POLICY, [tokenizer.eos_token_id]) if is_main else None
    with serving(stand_in) if is_main else contextlib.nullcontext() as url, vllm_at_hand(stand_in):
        changes = {
            "max_steps": 2, "per_device_train_batch_size": 8 // WORLD_SIZE, "learning_rate": 0.3,
            "optim": "sgd", "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url,
        }  # fmt: skip
        config = StepGRPOConfig(f"{output}-run", **SETTINGS | changes)
        trainer = StepGRPOTrainer(str(TINY_POLICY), make_env, config, processing_class=tokenizer)
        brought = []
        complete = trainer.generator._complete_with_vllm

        def noting(prompts):
            brought.append(len(prompts))
            return complete(prompts)

        trainer.generator._complete_with_vllm = noting
        trainer.train()
        everything = gather_object([brought])
        if is_main:
            log = [entry for entry in trainer.state.log_history if "loss" in entry]
            torch.save(
                {
                    "weights": dict(trainer.accelerator.unwrap_model(trainer.model).state_dict()),
                    "server_weights": dict(stand_in.model.state_dict()),
                    "brought": everything,
                    "calls": stand_in.calls,
                    "asked": [len(prompts) for prompts in stand_in.prompts],
                    "reward": [entry["reward"] for entry in log],
                },
                output,
            )
        broadcast_object_list([None])  # all stay while the server is in use


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
    leave_process_group()
