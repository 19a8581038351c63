"""Programs in the trainer: everything after the trajectory is what environments have."""

import atexit
import json

import httpx
import pytest
import torch

from agent_envs import ConfigurationError
from agent_trainers.programs import EnvironmentTools, ProgramTasks
from agent_trainers.trainers.grpo import StepGRPOTrainer
from tests.agent_trainers.gradients import assert_close, gradient, micro_batches

CLIENT = httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60)
atexit.register(CLIENT.close)
TASKS = [{"task": i} for i in range(12)]
TIMES = ("time", "seconds", "per_second")


def ask(session, messages, tools):
    reply = CLIENT.post(
        f"{session.base_url}/chat/completions",
        headers={"Authorization": f"Bearer {session.key}"},
        json={"model": "policy", "messages": messages, "tools": tools},
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]


def search_and_answer(session, task, roles=("", "", "")):
    """Let the model search, then answer; each turn is another role's, where there are any."""
    world = EnvironmentTools("AgentR1/SyntheticMultiHop-v0", task=task["task"])
    messages = list(world.messages)
    for role in roles:
        message = ask(session.role(role) if role else session, messages, world.schemas)
        messages.append(message)
        if not message.get("tool_calls"):
            return world.outcome(message["content"].strip("</answer> "))
        for call in message["tool_calls"]:
            found = world.call(
                call["function"]["name"], **json.loads(call["function"]["arguments"])
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
    return world.outcome(None)


def in_roles(session, task):
    return search_and_answer(session, task, ("planner", "executor", "executor"))


@pytest.fixture
def make_trainer(tiny_policy, tokenizer, make_config):
    def make(program=search_and_answer, frozen_roles=(), max_concurrency=None, **changes):
        tasks = ProgramTasks(
            program, TASKS, frozen_roles=frozen_roles, max_concurrency=max_concurrency
        )
        return StepGRPOTrainer(
            tiny_policy, tasks, make_config(**changes), processing_class=tokenizer
        )

    return make


def test_what_is_trained_is_what_was_sampled(make_trainer):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/max"] < 1e-4
    assert logged["episodes/answered"] == 1.0
    assert logged["tools/calls/search"] > 0
    assert len({t.task_id for t in trainer.trajectories["train"]}) > 1
    assert logged["grad_norm"] > 0


def test_a_run_of_programs_goes_on_as_if_nothing_had_happened(make_trainer, tmp_path):
    # One at a time: side by side they are sampled in other batches, equal to float rounding only.
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "max_concurrency": 1}
    whole = make_trainer(**settings)
    whole.train()
    resumed = make_trainer(output_dir=str(tmp_path / "resumed"), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    one, two = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert log_of(whole) == pytest.approx(log_of(resumed), rel=0, abs=0, nan_ok=True)


def test_a_frozen_role_has_a_gradient_of_exactly_0(make_trainer):
    trainer = make_trainer(in_roles, ["planner", "executor"], beta=0.1, kl_placement="loss")
    played = trainer.rollouts.collect(
        [{"task": i // 4} for i in range(8)], "train", (0, 0)
    ).trajectories
    assert all(t.transitions for t in played)
    batches = micro_batches(trainer, played)
    assert gradient(trainer, batches).abs().max() == 0.0


def test_a_frozen_role_changes_nothing_of_the_others_gradient(make_trainer):
    trainer = make_trainer(in_roles)
    played = trainer.rollouts.collect(
        [{"task": i // 4} for i in range(8)], "train", (0, 0)
    ).trajectories
    both = gradient(trainer, micro_batches(trainer, played))
    parts = []
    for kept in ("planner", "executor"):
        frozen = make_trainer(in_roles, [{"planner": "executor"}.get(kept, "planner")])
        frozen.model.load_state_dict(trainer.model.state_dict())
        marked = frozen.rollouts.collect(
            [{"task": i // 4} for i in range(8)], "train", (0, 0)
        ).trajectories
        batches = micro_batches(frozen, marked)
        trained = sum(float(batch["tool_mask"].sum()) for batch in batches)
        parts.append((gradient(frozen, batches), trained))
    # A mean over tokens of both roles: each role's own mean, by its share of the tokens
    total = sum(count for _, count in parts)
    expected = sum(own * (count / total) for own, count in parts)
    assert both.abs().max() > 1e-3
    assert_close(both, expected)


def test_metrics_are_kept_by_role(make_trainer):
    trainer = make_trainer(in_roles, max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["roles/planner/mean_turns"] == 1.0
    assert logged["roles/executor/mean_turns"] > 0


def test_when_every_program_fails_the_run_ends_with_the_first_error(make_trainer):
    def broken(session, task):
        search_and_answer(session, task)
        raise ValueError("no such file")

    with pytest.raises(RuntimeError, match=r"(?s)environment_error 8.*no such file"):
        make_trainer(broken).train()


def test_a_scheduled_reward_term_is_looked_for_when_it_comes(make_trainer):
    with pytest.raises(ConfigurationError, match="column 'task'"):
        StepGRPOTrainer(
            "x", ProgramTasks(search_and_answer, TASKS), train_dataset=_dataset({"index": [1]})
        )


def _dataset(columns):
    from datasets import Dataset

    return Dataset.from_dict(columns)


def log_of(trainer):
    return [
        value
        for entry in trainer.state.log_history
        for name, value in sorted(entry.items())
        if not any(t in name for t in TIMES) and isinstance(value, float | int)
    ]
