"""Train the embedded policy with TRL's own GRPOTrainer, in an environment of ours."""

from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_trainers import TINY_POLICY

ENVIRONMENT = "AgentR1/SyntheticMultiHop-v0"

config = GRPOConfig(
    output_dir="runs/plain_trl",
    max_steps=3,
    num_generations=8,
    per_device_train_batch_size=64,
    max_completion_length=250,  # of the whole episode
    max_tool_calling_iterations=3,  # the environment has 4 turns; the last is the answer's
    learning_rate=1e-3,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
)
trainer = GRPOTrainer(
    model=str(TINY_POLICY),
    args=config,
    train_dataset=tasks_dataset(ENVIRONMENT, num_tasks=40),
    environment_factory=environment_factory(ENVIRONMENT),
    reward_funcs=[environment_return],
    processing_class=AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left"),
)
trainer.train()
for entry in trainer.state.log_history:
    if "success" in entry:
        terms = {name: value for name, value in entry.items() if name.startswith("rewards/")}
        print(f"step {entry['step']}: success {entry['success']:.2f}, {terms}")
