"""Plain ``trl.GRPOTrainer`` in environments of ours."""

import pytest
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import (
    environment_factory,
    environment_return,
    tasks_dataset,
)

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def make_trainer(tmp_path, tiny_policy, tokenizer, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def make(reward_funcs, **changes):
        config = GRPOConfig(
            output_dir=str(tmp_path), max_steps=2, num_generations=4, learning_rate=1e-3,
            per_device_train_batch_size=8, max_completion_length=200,
            max_tool_calling_iterations=3, use_cpu=True, bf16=False, gradient_checkpointing=False,
            dataloader_pin_memory=False, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, **changes,
        )  # fmt: skip
        return GRPOTrainer(
            model=tiny_policy,
            args=config,
            train_dataset=tasks_dataset(ID, 4),
            environment_factory=environment_factory(ID),
            reward_funcs=reward_funcs,
            processing_class=tokenizer,
        )

    return make


def test_it_trains_and_logs_every_term_and_groups_share_their_task(make_trainer):
    trainer = make_trainer([environment_return])
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "success" in entry]
    assert len(logs) == 2
    for entry in logs:
        terms = entry["rewards/exact_match"] + entry["rewards/new_gold_passage"]
        assert terms == pytest.approx(entry["reward"], abs=1e-5)
        assert entry["success"] == pytest.approx(entry["rewards/exact_match"])
        assert entry["episodes/failed"] == 0.0
        assert entry["tools/call_frequency"] > 0.5
        assert entry["tools/failure_frequency"] == 0.0
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert any(not old.equal(new) for old, new in pairs)

    assert len(trainer.environments) == len({id(e) for e in trainer.environments}) == 8
    tasks = [environment._episode.env.unwrapped.task.id for environment in trainer.environments]
    assert len(set(tasks[:4])) == len(set(tasks[4:])) == 1
    assert tasks[0] != tasks[4]
