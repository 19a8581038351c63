"""Train the embedded policy for a few steps with a tool and a context of your own."""

import gymnasium as gym
from transformers import AutoTokenizer

from agent_envs import tool
from agent_trainers import TINY_POLICY, StepGRPOConfig, StepGRPOTrainer


@tool(timeout=2.0)
def count_words(text: str) -> int:
    """Count the words of a text.

    Args:
        text: The text.
    """
    return len(text.split())


def make_env() -> gym.Env:
    """Make one environment; the trainer calls this once for each episode that runs at once."""
    return gym.make(
        "AgentR1/SyntheticMultiHop-v0",
        tools=[count_words],
        context={"name": "window", "turns": 2},
        rewards={"exact_match": 1.0, "new_gold_passage": 0.2, "repeated_query": 0.1},
    )


config = StepGRPOConfig(
    output_dir="runs/own_tool",
    advantage_estimator="grpo_step",
    max_steps=3,
    num_generations=8,
    per_device_train_batch_size=32,
    max_completion_length=24,
    learning_rate=1e-3,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = StepGRPOTrainer(
    model=str(TINY_POLICY),
    env=make_env,
    args=config,
    processing_class=AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left"),
)
trainer.train()
for entry in trainer.state.log_history:
    if "success" in entry:
        print(f"step {entry['step']}: success {entry['success']:.2f}, return {entry['reward']:.2f}")
