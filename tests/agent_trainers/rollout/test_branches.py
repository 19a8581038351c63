import copy
import itertools
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from numpy.random import default_rng

from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.local import load_policy
from agent_trainers.rollout import collector
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason, load_trajectories, save_trajectories

ID = "AgentR1/SyntheticMultiHop-v0"


def specs(count):
    return [EpisodeSpec(task=i, seed=i, group_id=f"g{i}", rng=default_rng(i)) for i in range(count)]


class CounterEnv(gym.Env):
    """Adds up what is said, and its own luck, which is drawn from the seed; over at 9.

    On demand it leaks its past, pays by a rate, or has moods from nobody's seed.
    """

    def __init__(self, *, leaks=False, rate=1, moods=None):
        self._leaks, self._moods = leaks, moods
        self._num_episodes, self.rate = 0, rate

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_episodes += 1
        self.total = self._num_episodes if self._leaks else 0
        self.mood = next(self._moods) if self._moods else 0
        return "go", self._info()

    def step(self, action):
        earned = int(action) + int(self.np_random.integers(2))
        self.total += earned
        return "on", float(earned * self.rate), self.total >= 9, False, self._info()

    def _info(self):
        messages = [{"role": "user", "content": f"mood {self.mood}, total {self.total}"}]
        return {"messages": messages, "tools": [], "task_id": "t", "metrics": {}}


def draw(request):
    return str(request.rng.integers(3))


def search(request):
    said = ['{"name": "search", "arguments": {"query": "x"}}', "{", "<answer>a</answer>"]
    drawn = said[request.rng.choice(3, p=[0.6, 0.3, 0.1])]
    return drawn if drawn.startswith("<") else f"<tool_call>{drawn}</tool_call>"


def limited(**settings):
    return TimeLimit(CounterEnv(**settings), 6)


def record(make_env=limited, act=draw):
    rollout = Rollout(make_env, ScriptedPolicy(act))
    return rollout, *rollout.collect(specs(1))


def branch(rollout, recorded, step, count=1, *, seed=0):
    branches = rollout.branch(recorded, step, count, rng=default_rng(seed))
    return branches, branches.continuations[0]


def states_of(recorded):
    return [(t, step) for t in recorded for step in range(len(t.transitions))]


def steps_of(trajectory):
    return trajectory.transitions, trajectory.metrics, trajectory.stop_reason


@pytest.mark.parametrize(("make_env", "act"), [
    pytest.param(limited, draw, id="in threads"),
    pytest.param(lambda: gym.make(ID), search, id="at once"),
])  # fmt: skip
def test_a_branch_that_acts_as_was_recorded_is_the_recorded_episode(make_env, act):
    policy = ScriptedPolicy(lambda request: act(request))
    rollout = Rollout(make_env, policy)
    states = states_of(rollout.collect(specs(3)))
    assert len(states) > 6
    rest = [iter([each.action for each in t.transitions[step:]]) for t, step in states]
    act = lambda request: next(rest[request.episode_id])  # noqa: E731
    branches = rollout.branch_many(states, 1, rng=default_rng(0))
    for (trajectory, step), (same,) in zip(states, branches.continuations, strict=True):
        assert steps_of(same) == steps_of(trajectory)
        assert (same.start, same.task_id) == (step, trajectory.task_id)
        assert len(same.step_seconds) == len(same.transitions)
    assert branches.environment_steps == sum(len(t.transitions) - step for t, step in states)


def test_branches_differ_and_are_drawn_again_from_the_same_generator():
    rollout, recorded = record()
    (one, drawn), (_, again) = (branch(rollout, recorded, 1, 20, seed=5) for _ in range(2))
    assert [*map(steps_of, drawn)] == [*map(steps_of, again)]
    assert len({len(t.transitions) for t in drawn}) > 1
    assert all(t.transitions[:1] == recorded.transitions[:1] for t in drawn)
    own = [t.rewards[1:] for t in drawn]
    assert one.returns()[0] == [sum(rewards) for rewards in own]
    assert one.returns(0.5)[0][0] == sum(r * 0.5**i for i, r in enumerate(own[0]))
    assert one.usage.calls == one.environment_steps == sum(map(len, own))


def test_a_run_with_branches_is_bit_for_bit_the_run_without_them():
    def run(*, branches):
        planned = specs(3)
        rollout = Rollout(lambda: limited(leaks=True), ScriptedPolicy(draw))
        first = rollout.collect(planned)
        before = copy.deepcopy(first)
        if branches:
            np.random.seed(0)  # noqa: NPY002 - that nobody draws from the global generator
            drawn = np.random.get_state()[2]  # noqa: NPY002
            rollout.branch_many(states_of(first), 3, rng=default_rng(0))
            assert np.random.get_state()[2] == drawn  # noqa: NPY002
        assert [*map(steps_of, first)] == [*map(steps_of, before)]
        return [*map(steps_of, first)], [*map(steps_of, rollout.collect(planned))]

    # environments that remember their earlier episodes: had a branch used one, it would be seen
    assert run(branches=True) == run(branches=False)


def test_states_of_several_environments_are_not_mixed_up_where_they_look_the_same():
    envs = {"low": lambda: CounterEnv(rate=1), "high": lambda: CounterEnv(rate=10)}
    policy = ScriptedPolicy(lambda request: "2")
    rollout = Rollout(envs, policy)
    states = states_of(rollout.collect([replace(specs(1)[0], env=name) for name in envs]))
    branches = rollout.branch_many(states, 2, rng=default_rng(0))
    for (trajectory, _), same in zip(states, branches.continuations, strict=True):
        assert [(b.env, steps_of(b)) for b in same] == [(trajectory.env, steps_of(trajectory))] * 2


def test_a_branch_can_be_branched_and_comes_back_from_a_file(tmp_path):
    _, (first,) = branch(*record(), 2, seed=1)
    save_trajectories(tmp_path / "branch.jsonl", [first])
    (loaded,) = load_trajectories(tmp_path / "branch.jsonl")
    assert loaded == first
    last = len(first.transitions) - 1
    _, (deeper,) = branch(Rollout(limited, ScriptedPolicy(draw)), loaded, last, seed=2)
    assert deeper.transitions[:last] == first.transitions[:last]
    assert deeper.start == last


def test_the_policy_is_shown_the_tokens_that_were_recorded(tiny_policy):
    rollout = Rollout(lambda: gym.make(ID), load_policy(str(tiny_policy)))
    recorded = max(rollout.collect(specs(4)), key=lambda t: len(t.transitions))
    step = len(recorded.transitions) - 1
    assert step > 0
    _, branches = branch(rollout, recorded, step, 3)
    prompt = recorded.transitions[step].prompt_ids
    assert [b.transitions[step].prompt_ids for b in branches] == [prompt] * 3
    assert all(b.usage["completion_tokens"] == sum(b.lengths[step:]) for b in branches)


def test_what_cannot_be_reached_is_refused_by_name():
    moods = itertools.count()
    rollout, recorded = record(lambda: CounterEnv(moods=moods))
    sentence = "CounterEnv, task 0, after 0 of 1 actions: the replayed messages"
    with pytest.raises(SnapshotError, match=sentence):
        branch(rollout, recorded, 1, 2)
    with pytest.raises(ConfigurationError, match="it has no seed to replay it from"):
        branch(rollout, replace(recorded, seed=None), 1)
    with pytest.raises(ConfigurationError, match=r"no state before step 99: its steps are 0 to"):
        branch(rollout, recorded, 99)


def test_a_branch_that_fails_is_recorded_beside_the_others():
    def act(request):
        return "x" if request.rng.random() < 0.5 else "3"  # int("x") raises in the environment

    _, recorded = record(act=lambda request: "1")
    branches, tried = branch(Rollout(limited, ScriptedPolicy(act)), recorded, 1, 12)
    reasons = {t.stop_reason for t in tried}
    assert reasons == {StopReason.ENVIRONMENT_ERROR, StopReason.ANSWERED}
    assert len(branches.returns()[0]) < 12


def test_no_more_branches_are_under_way_than_allowed(monkeypatch):
    monkeypatch.setattr(collector, "MAX_BRANCHES_AT_ONCE", 2)
    made = []
    rollout, recorded = record(lambda: made.append(1) or limited())
    states = [(recorded, 1), (recorded, 0)]
    branches = rollout.branch_many(states, [5, 2], rng=default_rng(0))
    assert [len(same) for same in branches.continuations] == [5, 2]
    assert len(made) == 1 + 2
