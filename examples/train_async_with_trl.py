"""Train with TRL's asynchronous GRPO: episodes go on while the model is trained, step by step.

Needs a GPU for training, and a vLLM server on another one, which gets the weights over NCCL::

    VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen2.5-3B-Instruct --max-model-len 9216 --port 8000 \
        --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs
    CUDA_VISIBLE_DEVICES=1 python examples/train_async_with_trl.py http://localhost:8000

Not run by us with GPUs, vLLM and NCCL; a test runs the same with stand-ins for these three.
"""

import sys

import gymnasium as gym
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import agent_envs  # noqa: F401 - registers the environments
from agent_trainers.experimental.async_rollouts import EnvironmentRolloutWorker
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings

MODEL = "Qwen/Qwen2.5-3B-Instruct"
SERVER = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000"
MAX_NEW_TOKENS = 1024
TASKS = range(10_000)


def make_env() -> gym.Env:
    """Make one environment; the worker calls this once for each episode that runs at once."""
    return gym.make(
        "AgentR1/HotpotQA-v0", split="train", context={"name": "budget", "tokens": 7000}
    )


tokenizer = AutoTokenizer.from_pretrained(MODEL)
policy = VLLMServerPolicy(
    SERVER,
    ChatRenderer(tokenizer),
    SamplingSettings(max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=(tokenizer.eos_token_id,)),
    max_concurrency=128,
)
worker = EnvironmentRolloutWorker(
    make_env,
    policy,
    TASKS,
    num_generations=8,
    num_groups_at_once=16,
    advantage_estimator="grpo_step",
)
trainer = AsyncGRPOTrainer(
    model=MODEL,
    args=AsyncGRPOConfig(
        output_dir="runs/async_hotpotqa",
        max_steps=200,
        num_generations=8,
        max_completion_length=MAX_NEW_TOKENS,
        vllm_server_base_url=SERVER,
        max_staleness=4,
        weight_sync_steps=1,
        learning_rate=1e-6,
        logging_steps=1,
    ),
    train_dataset=Dataset.from_dict({"task": list(TASKS)}),
    processing_class=tokenizer,
    rollout_worker=worker,
)
trainer.train()
trainer.save_model()
