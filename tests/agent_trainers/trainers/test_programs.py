"""Programs in the trainer: everything after the trajectory is what environments have."""

import json

import pytest

from agent_trainers.programs import EnvironmentTools, ProgramTasks
from tests.agent_trainers.gradients import assert_close, collect, gradient, micro_batches
from tests.agent_trainers.programs.test_rollout import ask

TASKS = [{"task": i} for i in range(12)]


def search_and_answer(session, task, roles=("", "", "")):
    """Let the model search, then answer; each turn is another role's, where there are any."""
    world = EnvironmentTools("AgentR1/SyntheticMultiHop-v0", task=task["task"])
    messages = list(world.messages)
    for role in roles:
        message = ask(session.role(role) if role else session, *messages, tools=world.schemas)
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
def make_trainer(make_trainer):
    def make(program=search_and_answer, frozen_roles=(), **changes):
        tasks = ProgramTasks(program, TASKS, frozen_roles=frozen_roles)
        return make_trainer(tasks, **changes)

    return make


@pytest.mark.parametrize("rollout", ["sync", "async"])
def test_what_is_trained_is_what_was_sampled(make_trainer, rollout):
    trainer = make_trainer(max_steps=2, rollout=rollout)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/max"] < 1e-4
    assert logged["episodes/answered"] == 1.0
    assert logged["tools/calls/search"] > 0
    assert len({t.task_id for t in trainer.trajectories["train"]}) > 1
    assert logged["grad_norm"] > 0


def test_a_frozen_role_changes_nothing_of_the_others_gradient(make_trainer):
    trainer = make_trainer(in_roles)
    played = collect(trainer)
    both = gradient(trainer, micro_batches(trainer, played))
    frozen = make_trainer(in_roles, ["planner", "executor"], beta=0.1)
    none = gradient(frozen, micro_batches(frozen, collect(frozen)))
    assert none.abs().max() == 0.0
    parts = []
    for kept in ("planner", "executor"):
        frozen = make_trainer(in_roles, [{"planner": "executor"}.get(kept, "planner")])
        frozen.model.load_state_dict(trainer.model.state_dict())
        batches = micro_batches(frozen, collect(frozen))
        trained = sum(float(batch["tool_mask"].sum()) for batch in batches)
        parts.append((gradient(frozen, batches), trained))
    # A mean over tokens of both roles: each role's own mean, by its share of the tokens
    total = sum(count for _, count in parts)
    expected = sum(own * (count / total) for own, count in parts)
    assert both.abs().max() > 1e-3
    assert_close(both, expected)


def test_when_every_program_fails_the_run_ends_with_the_first_error(make_trainer):
    def broken(session, task):
        search_and_answer(session, task)
        raise ValueError("no such file")

    with pytest.raises(RuntimeError, match=r"(?s)environment_error 8.*no such file"):
        make_trainer(broken).train()
