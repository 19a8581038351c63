import copy
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.experimental.branching.saved_states import StateStore
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.local import load_policy
from agent_trainers.rollout import collector
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import (
    StopReason,
    load_trajectories,
    save_trajectories,
)

ID = "AgentR1/SyntheticMultiHop-v0"


def specs(count):
    return [
        EpisodeSpec(task=i, seed=i, group_id=f"g{i}", rng=np.random.default_rng(i))
        for i in range(count)
    ]


class CounterEnv(gym.Env):
    """Adds up what is said, and its own luck; over at 9. Has snapshots; leaks its past on demand.

    `luck` is drawn from the seed, so equal actions give equal episodes.
    """

    def __init__(self, *, leaks=False):
        self._leaks, self._num_episodes = leaks, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._num_episodes += 1
        self.total = self._num_episodes if self._leaks else 0
        return "go", self._info()

    def step(self, action):
        earned = int(action) + int(self.np_random.integers(2))
        self.total += earned
        return "on", float(earned), self.total >= 9, False, self._info()

    def snapshot(self):
        return self.total, copy.deepcopy(self.np_random)

    def restore(self, snapshot):
        self.total, self.np_random = copy.deepcopy(snapshot)

    def _info(self):
        messages = [{"role": "user", "content": f"total {self.total}"}]
        return {"messages": messages, "tools": [], "task_id": "t", "metrics": {}}


class Unsaved(gym.Wrapper):
    """A wrapper whose state nobody knows: what it counts is not in the environment's snapshots."""

    num_steps = 0

    def reset(self, **options):
        self.num_steps = 0
        return self.env.reset(**options)

    def step(self, action):
        self.num_steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated or self.num_steps == 4, info


def draw(request):
    return str(request.rng.integers(3))


def limited(**settings):
    return TimeLimit(CounterEnv(**settings), 6)


KINDS = {
    "snapshots, in threads": limited,
    "replay": lambda: Unsaved(CounterEnv()),
    "snapshots, at once": lambda: gym.make(ID),
}


def policy_of(make_env):
    if make_env is not KINDS["snapshots, at once"]:
        return draw
    searches = ['{"name": "search", "arguments": {"query": "x"}}', "{", "<answer>a</answer>"]

    def act(request):
        drawn = searches[request.rng.choice(3, p=[0.6, 0.3, 0.1])]
        return drawn if drawn.startswith("<") else f"<tool_call>{drawn}</tool_call>"

    return act


def steps_of(trajectory):
    return trajectory.transitions, trajectory.metrics, trajectory.stop_reason


@pytest.mark.parametrize("keeps_states", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_that_acts_as_was_recorded_is_the_recorded_episode(kind, keeps_states):
    act = policy_of(KINDS[kind])
    rollout = Rollout(
        KINDS[kind],
        ScriptedPolicy(lambda request: act(request)),
        states=StateStore() if keeps_states else None,
    )
    recorded = rollout.collect(specs(3))
    states = [(t, step) for t in recorded for step in range(len(t.transitions))]
    assert len(states) > 6
    rest = [iter([each.action for each in t.transitions[step:]]) for t, step in states]
    act = lambda request: next(rest[request.episode_id])  # noqa: E731
    branches = rollout.branch_many(states, 1, rng=np.random.default_rng(0))
    for (trajectory, step), (branch,) in zip(states, branches.continuations, strict=True):
        assert steps_of(branch) == steps_of(trajectory)
        assert (branch.start, branch.task_id) == (step, trajectory.task_id)
        assert len(branch.step_seconds) == len(branch.transitions)
    assert branches.environment_steps == sum(len(t.transitions) - step for t, step in states)
    can_restore = keeps_states and kind != "replay"
    assert branches.replayed_steps == (0 if can_restore else sum(step for _, step in states))


def test_branches_differ_and_are_drawn_again_from_the_same_generator():
    rollout = Rollout(limited, ScriptedPolicy(draw))
    (recorded,) = rollout.collect(specs(1))
    one, again = (rollout.branch(recorded, 1, 20, rng=np.random.default_rng(5)) for _ in range(2))
    assert one == again or [*map(steps_of, one.continuations[0])] == [
        *map(steps_of, again.continuations[0])
    ]
    assert len({len(t.transitions) for t in one.continuations[0]}) > 1
    assert all(t.transitions[:1] == recorded.transitions[:1] for t in one.continuations[0])
    own = [branch.rewards[1:] for branch in one.continuations[0]]
    assert one.returns()[0] == [sum(rewards) for rewards in own]
    assert one.returns(0.5)[0][0] == sum(r * 0.5**i for i, r in enumerate(own[0]))
    assert one.usage.calls == one.environment_steps == sum(map(len, own))


def test_a_run_with_branches_is_bit_for_bit_the_run_without_them():
    def run(*, branches):
        made = [limited(leaks=True) for _ in range(3)]
        planned = specs(3)
        rollout = Rollout(lambda: made.pop() if made else limited(leaks=True), ScriptedPolicy(draw))
        first = rollout.collect(planned)
        before = copy.deepcopy(first)
        if branches:
            states = [(t, step) for t in first for step in range(len(t.transitions))]
            np.random.seed(0)  # noqa: NPY002 - that nobody draws from the global generator
            drawn = np.random.get_state()[2]  # noqa: NPY002
            rollout.branch_many(states, 3, rng=np.random.default_rng(0))
            assert np.random.get_state()[2] == drawn  # noqa: NPY002
        assert [*map(steps_of, first)] == [*map(steps_of, before)]
        return [*map(steps_of, first)], [*map(steps_of, rollout.collect(planned))]

    # environments that remember their earlier episodes: had a branch used one, it would be seen
    assert run(branches=True) == run(branches=False)


class RatedEnv(CounterEnv):
    """Pays by a rate, which is part of its state, and shows the same at any rate."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def step(self, action):
        observation, earned, *rest = super().step(action)
        return observation, earned * self.rate, *rest

    def snapshot(self):
        return self.rate, super().snapshot()

    def restore(self, snapshot):
        self.rate, rest = snapshot
        super().restore(rest)


@pytest.mark.parametrize("keeps_states", [True, False])
def test_states_of_several_environments_are_not_mixed_up_where_they_look_the_same(keeps_states):
    envs = {"low": lambda: RatedEnv(1), "high": lambda: RatedEnv(10)}
    policy = ScriptedPolicy(lambda request: "2")
    rollout = Rollout(envs, policy, states=StateStore() if keeps_states else None)
    recorded = rollout.collect([replace(specs(1)[0], env=name) for name in envs])
    states = [(t, step) for t in recorded for step in range(len(t.transitions))]
    branches = rollout.branch_many(states, 2, rng=np.random.default_rng(0))
    for (trajectory, _), same in zip(states, branches.continuations, strict=True):
        assert [(b.env, steps_of(b)) for b in same] == [(trajectory.env, steps_of(trajectory))] * 2


def test_a_branch_can_be_branched_and_comes_back_from_a_file(tmp_path):
    rollout = Rollout(limited, ScriptedPolicy(draw))
    (recorded,) = rollout.collect(specs(1))
    (branch,) = rollout.branch(recorded, 2, 1, rng=np.random.default_rng(1)).continuations[0]
    save_trajectories(tmp_path / "branch.jsonl", [branch])
    (loaded,) = load_trajectories(tmp_path / "branch.jsonl")
    assert loaded == branch
    last = len(branch.transitions) - 1
    new = Rollout(limited, ScriptedPolicy(draw))
    (deeper,) = new.branch(loaded, last, 1, rng=np.random.default_rng(2)).continuations[0]
    assert deeper.transitions[:last] == branch.transitions[:last]
    assert deeper.start == last


def test_the_policy_is_shown_the_tokens_that_were_recorded(tiny_policy):
    policy = load_policy(str(tiny_policy))
    rollout = Rollout(lambda: gym.make(ID), policy)
    recorded = max(rollout.collect(specs(4)), key=lambda t: len(t.transitions))
    step = len(recorded.transitions) - 1
    assert step > 0
    branches = rollout.branch(recorded, step, 3, rng=np.random.default_rng(0)).continuations[0]
    prompt = recorded.transitions[step].prompt_ids
    assert [b.transitions[step].prompt_ids for b in branches] == [prompt] * 3
    assert all(b.usage["completion_tokens"] == sum(b.lengths[step:]) for b in branches)


class Unsettled(CounterEnv):
    """Takes snapshots, but fails when it is to be set back to one."""

    def restore(self, snapshot):
        self.total = None
        raise KeyError("total")


def test_where_a_snapshot_cannot_be_restored_the_steps_are_taken_again():
    rollout = Rollout(lambda: TimeLimit(Unsettled(), 6), ScriptedPolicy(draw), states=StateStore())
    (recorded,) = rollout.collect(specs(1))
    branches = rollout.branch(recorded, 2, 3, rng=np.random.default_rng(0))
    assert all(branch.is_scorable for branch in branches.continuations[0])
    assert branches.replayed_steps == 3 * 2


def test_a_store_knows_which_branches_need_a_replay():
    store = StateStore()
    rollout = Rollout(limited, ScriptedPolicy(draw), states=store)
    (recorded,) = rollout.collect(specs(1))
    (branch,) = rollout.branch(recorded, 1, 1, rng=np.random.default_rng(1)).continuations[0]
    assert not store.replays(recorded)
    assert not store.replays(branch)
    store.clear()
    assert store.replays(recorded)
    assert not store.replays(replace(branch, start=len(branch.transitions) - 1))  # no later state


class MoodySavedEnv(CounterEnv):
    """Draws from nobody's seed, but offers snapshots."""

    moods = iter(range(1000))

    def reset(self, **options):
        self.mood = next(self.moods)
        return super().reset(**options)

    def snapshot(self):
        return self.mood, super().snapshot()

    def restore(self, snapshot):
        self.mood, rest = snapshot
        super().restore(rest)

    def _info(self):
        messages = [{"role": "user", "content": f"mood {self.mood}, total {self.total}"}]
        return super()._info() | {"messages": messages}


class MoodyEnv(MoodySavedEnv):
    """Draws from nobody's seed, and offers no snapshot."""

    snapshot = restore = None


def test_states_that_branches_come_to_are_kept_too_also_where_no_replay_reaches_them():
    for make_env in (limited, MoodySavedEnv):
        rollout = Rollout(make_env, ScriptedPolicy(draw), states=StateStore())
        (recorded,) = rollout.collect(specs(1))
        first = rollout.branch(recorded, 1, 1, rng=np.random.default_rng(1))
        (branch,) = first.continuations[0]
        last = len(branch.transitions) - 1
        assert last > 1  # a state of the branch's own
        again = rollout.branch(branch, last, 4, rng=np.random.default_rng(2))
        assert first.replayed_steps == again.replayed_steps == 0
        shared = [t.transitions[:last] for t in again.continuations[0]]
        assert shared == [branch.transitions[:last]] * 4
        assert all(t.is_scorable for t in again.continuations[0])


def test_a_branch_that_was_replayed_keeps_no_state_of_its_beginning():
    recording = Rollout(limited, ScriptedPolicy(draw))
    (recorded,) = recording.collect(specs(1))
    rollout = Rollout(limited, ScriptedPolicy(draw), states=StateStore())
    rollout.branch(recorded, 2, 1, rng=np.random.default_rng(1))  # by replay: it kept nothing
    again = rollout.branch(recorded, 2, 1, rng=np.random.default_rng(1))
    assert again.continuations[0][0].is_scorable
    expected = recording.branch(recorded, 2, 1, rng=np.random.default_rng(1))
    assert steps_of(again.continuations[0][0]) == steps_of(expected.continuations[0][0])


def test_what_can_be_reached_neither_way_is_refused_by_name():
    rollout = Rollout(MoodyEnv, ScriptedPolicy(draw))
    (recorded,) = rollout.collect(specs(1))
    with pytest.raises(
        SnapshotError, match=r"MoodyEnv, task 0, after 0 of 1 actions: the replayed messages"
    ):
        rollout.branch(recorded, 1, 2, rng=np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match="it has no seed to replay it from"):
        rollout.branch(replace(recorded, seed=None), 1, 1, rng=np.random.default_rng(0))
    with pytest.raises(ConfigurationError, match=r"no state before step 99: its steps are 0 to"):
        rollout.branch(recorded, 99, 1, rng=np.random.default_rng(0))


def test_a_branch_that_fails_is_recorded_beside_the_others():
    def act(request):
        return "x" if request.rng.random() < 0.5 else "3"  # int("x") raises in the environment

    (recorded,) = Rollout(limited, ScriptedPolicy(lambda request: "1")).collect(specs(1))
    branches = Rollout(limited, ScriptedPolicy(act)).branch(
        recorded, 1, 12, rng=np.random.default_rng(0)
    )
    reasons = {branch.stop_reason for branch in branches.continuations[0]}
    assert reasons == {StopReason.ENVIRONMENT_ERROR, StopReason.ANSWERED}
    assert len(branches.returns()[0]) < 12


def test_no_more_branches_are_under_way_than_allowed(monkeypatch):
    monkeypatch.setattr(collector, "MAX_BRANCHES_AT_ONCE", 2)
    made = []
    rollout = Rollout(lambda: made.append(1) or limited(), ScriptedPolicy(draw))
    (recorded,) = rollout.collect(specs(1))
    branches = rollout.branch_many(
        [(recorded, 1), (recorded, 0)], [5, 2], rng=np.random.default_rng(0)
    )
    assert [len(same) for same in branches.continuations] == [5, 2]
    assert len(made) == 1 + 2


def test_saved_states_stay_within_their_bound():
    env, spec = CounterEnv(), specs(1)[0]
    env.reset(seed=0)
    info = env._info()
    store = StateStore()
    store.save(env, spec, [], info)
    size = store._num_bytes
    (played,) = Rollout(CounterEnv, ScriptedPolicy(lambda request: "1")).collect([spec])
    first, *_ = played.transitions
    first = replace(first, messages=info["messages"])
    recorded = [replace(played, transitions=[replace(first, action=str(i))] * 2) for i in range(3)]
    store = StateStore(max_bytes=2 * size)
    for i in range(3):
        store.save(env, spec, [str(i)], info)
        store.restore(env, recorded[0], 1)
    found = [store.restore(env, each, 1) is not None for each in recorded]
    assert found == [True, False, True]  # 1 was used longest ago
    store = StateStore(max_bytes=size - 1)
    store.save(env, spec, ["0"], info)
    assert store.restore(env, recorded[0], 1) is None
    assert store._num_bytes == 0
