"""Plain ``trl.GRPOTrainer`` in environments of ours."""

import pytest
from trl import GRPOConfig, GRPOTrainer

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from tests.agent_trainers.short_run import SETTINGS

ID = "AgentR1/SyntheticMultiHop-v0"


def test_it_trains_and_logs_every_term_and_groups_share_their_task(
    tmp_path, tiny_policy, tokenizer, monkeypatch
):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    changes = {"max_steps": 2, "max_completion_length": 200, "max_tool_calling_iterations": 3}
    trainer = GRPOTrainer(
        model=tiny_policy,
        args=GRPOConfig(str(tmp_path), **SETTINGS | changes),
        train_dataset=tasks_dataset(ID, 4),
        environment_factory=environment_factory(ID),
        reward_funcs=[environment_return],
        processing_class=tokenizer,
    )
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
