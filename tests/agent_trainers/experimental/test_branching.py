"""Training with branches: what is played beside the episodes, and what is learned from it."""

import dataclasses
import itertools
import json

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import ConfigurationError
from agent_envs.errors import SnapshotError
from agent_trainers.programs.rollout import ProgramTasks

PACKAGE = "agent_trainers.experimental.branching"
ID = "AgentR1/SyntheticMultiHop-v0"
ROWS = [{"task": i // 4} for i in range(8)]


@pytest.fixture
def make_trainer(make_trainer):
    def make(estimator, budget=None, **changes):
        if estimator in ("vine", "tree"):
            estimator = f"{PACKAGE}:{estimator}"
        if budget is not None:
            changes["extensions"] = json.dumps({f"{PACKAGE}:Branching": {"budget": budget}})
        return make_trainer(advantage_estimator=estimator, **changes)

    return make


def played(trainer, step=(0, 0)):
    trainer.model.train()
    trajectories = trainer.rollouts.collect(ROWS, "train", step).trajectories
    return [dataclasses.replace(t, timings={}, step_seconds=[]) for t in trajectories]


def num_steps(trajectories):
    return sum(len(t.transitions) - t.start for t in trajectories)


@pytest.mark.parametrize("estimator", ["vine", "tree"])
def test_branches_are_played_within_their_budget_beside_the_same_episodes(make_trainer, estimator):
    plain = played(make_trainer("grpo"))
    trainer = make_trainer(estimator, budget=2.0)
    with_branches = played(trainer)
    assert [t for t in with_branches if not t.start] == plain
    branches = [t for t in with_branches if t.start]
    assert 0.3 * num_steps(plain) < num_steps(branches) < 3 * num_steps(plain)
    assert played(trainer) == with_branches  # the same step of the run draws the same again
    assert played(trainer, (1, 0)) != with_branches
    # each branch follows what it shares its first steps with
    for i, branch in enumerate(with_branches):
        if branch.start:
            shared = branch.transitions[: branch.start]
            assert any(t.transitions[: branch.start] == shared for t in with_branches[:i])
    evaluated = trainer.rollouts.collect(ROWS, "eval", (0, 0)).trajectories
    assert [t.start for t in evaluated] == [0] * 8


def seen(episodes, *, gamma=1.0):
    """Ones, for all that is played."""
    return [np.ones(len(e.rewards) if e.is_scorable else 0) for e in episodes]


def learned(episodes):
    return seen(episodes)


seen.uses_branches = learned.uses_branches = learned.trains_branches = True
seen.extension = learned.extension = f"{PACKAGE}:Branching"


@pytest.mark.parametrize("estimator", ["vine", "tree", seen, learned])
def test_what_is_trained_and_what_is_logged(make_trainer, estimator):
    budget = 1.0 if isinstance(estimator, str) else None  # one's own takes branches unasked
    trainer = make_trainer(estimator, max_steps=1, logging_steps=1, budget=budget)
    trainer.train()
    batch = trainer.last_batch
    assert {(row.episode, step) for row in batch.rows for step in row.steps} == {
        (i, step)
        for i, t in enumerate(batch.trajectories)
        if not t.start or estimator in ("tree", learned)
        for step in range(t.start, len(t.transitions))
    }
    branches = [t for t in batch.trajectories if t.start]
    own = [t for t in batch.trajectories if not t.start]
    log = trainer.state.log_history[0]
    assert log["branches/count"] == len(branches) > 0
    assert log["branches/environment_steps"] == num_steps(branches)
    assert log["branches/completion_tokens"] == sum(t.usage["completion_tokens"] for t in branches)
    assert log["success"] == pytest.approx(sum(t.success for t in own) / len(own))


class Moody(gym.Wrapper):
    """Shows something else each time."""

    moods = itertools.count()

    def reset(self, **options):
        return self._changed(*self.env.reset(**options))

    def step(self, action):
        return self._changed(*self.env.step(action))

    def _changed(self, *result):
        *rest, info = result
        *messages, last = info["messages"]
        shown = last | {"content": f"{last['content']} {next(self.moods)}"}
        return *rest, info | {"messages": [*messages, shown]}


def test_an_environment_that_cannot_be_gone_back_to_is_refused_at_once(make_trainer):
    trainer = make_trainer("tree", env=lambda: Moody(gym.make(ID)), budget=3.0)
    trainer.model.train()
    with pytest.raises(SnapshotError, match="tree' restores states"):
        trainer.rollouts.collect(ROWS, "train", (0, 0))


@pytest.mark.parametrize(("changes", "message"), [
    ({"estimator": "grpo", "budget": 1.0}, "Branching does nothing with .*'grpo'"),
    ({"estimator": "vine", "budget": -1.0}, "budget must be a number of at least 0"),
    ({"estimator": "vine", "max_extra_groups": 2}, "compares states, not groups"),
    ({"estimator": "vine", "env": "program"}, "restores states of an environment"),
])  # fmt: skip
def test_settings_that_do_not_go_with_branches_are_refused(make_trainer, changes, message):
    if changes.get("env"):
        program = ProgramTasks(lambda session, task: 1.0, [{"question": "?"}] * 8)
        changes = changes | {"env": program}
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(**changes)
