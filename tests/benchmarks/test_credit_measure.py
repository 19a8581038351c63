from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

import agent_envs  # noqa: F401
from agent_envs.core.spaces import UnicodeText
from agent_envs.errors import RolloutError
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from benchmarks.credit.measure import Measurement

# V = 1/4 at first, 1/2 after heads, 0 after tails
TRUE = {("heads",): 0.25, ("tails",): -0.25, ("heads", "heads"): 0.5, ("heads", "tails"): -0.5,
        ("tails", "heads"): 0.0, ("tails", "tails"): 0.0}  # fmt: skip


class Coins(gym.Env):
    """A reward if both of two coins show heads; without snapshots, so branches replay."""

    observation_space = action_space = UnicodeText()
    is_immediate = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.coins = []
        return "", self._info((options or {}).get("task"))

    def step(self, action):
        self.coins.append(action)
        is_over = len(self.coins) == 2
        reward = float(self.coins == ["heads", "heads"])
        info = self._info(None) | ({"metrics": {"success": reward}} if is_over else {})
        return "", reward, is_over, False, info

    def reference_actions(self):
        return ["heads", "heads"]

    def _info(self, task):
        return {
            "messages": [{"role": "user", "content": " ".join(["coins:", *self.coins])}],
            "task_id": str(task),
            "metrics": {"success": 0.0},
        }


tosser = ScriptedPolicy(lambda request: "heads" if request.rng.random() < 0.5 else "tails")


def measured(seed=0, target=0.95, max_branches=2000):
    specs = [
        EpisodeSpec(task=task, seed=task, group_id=str(task),
                    rng=np.random.default_rng([seed, task, i]))
        for task in range(2) for i in range(4)
    ]  # fmt: skip
    measurement = Measurement(Rollout(Coins, tosser), specs, seed)
    measurement.measure(target, max_branches)
    return measurement


def actions_of(measurement):
    return [tuple(t.action for t in trajectory.transitions)
            for trajectory in measurement.trajectories]  # fmt: skip


def test_measured_advantages_equal_the_true_ones():
    measurement = measured()
    batch = measurement.batch(environment="coins", stage="start", seed=0)
    for episode, actions in zip(batch.episodes, actions_of(measurement), strict=True):
        true = [TRUE[actions[: t + 1]] for t in range(2)]
        # exact to 4 of its own standard errors; those are as small as was asked for
        errors = np.array(episode.standard_errors)
        assert np.all(np.abs(np.array(episode.advantages) - true) <= 4 * errors)
        assert errors.max() < 0.1
    assert batch.reliability > 0.9
    assert batch.reliability_by_variance == pytest.approx(batch.reliability, abs=0.06)


def test_branches_go_where_returns_vary():
    measurement = measured()
    counts = {
        (state.place[0].transitions[state.place[1]].messages[0]["content"]): len(state.returns)
        for state in measurement._states.values()
    }
    # after tails every return is 0; after heads it is 0 or 1, as at first (variance 1/4 and 3/16)
    assert counts["coins: tails"] < counts["coins: heads"]
    assert counts["coins: tails"] < counts["coins:"]


def test_equal_states_are_measured_once():
    measurement = measured(max_branches=2)
    batch = measurement.batch(environment="coins", stage="start", seed=0)
    states = {state for episode in batch.episodes for state in episode.states}
    places = {(e.group_id, a[:t]) for e, a in zip(batch.episodes, actions_of(measurement),
                                                  strict=True) for t in range(2)}  # fmt: skip
    assert len(states) == len(places) <= 2 * 3
    assert batch.costs["truth_branches"] == 2 * len(states)


class Breaking(Coins):
    """Fails once `is_broken` is set."""

    is_broken = False

    def step(self, action):
        if self.is_broken:
            raise RuntimeError("the table fell over")
        return super().step(action)


def test_a_state_without_a_value_is_reported_with_the_first_error(monkeypatch):
    def begin():
        draws = np.random.default_rng(0)
        spec = EpisodeSpec(task=7, seed=0, group_id="0", rng=draws)
        return Measurement(Rollout(Breaking, tosser), [spec], 0)

    measurement = begin()
    monkeypatch.setattr(Breaking, "is_broken", True)
    fell = "The first error: RuntimeError: the table fell over"
    with pytest.raises(RolloutError, match=f"step 0 of task .* has no value: 0 of 8 .*{fell}"):
        measurement.measure(0.9, 16)
    with pytest.raises(RolloutError, match=f"No episode .*{fell}"):
        begin()


def test_the_same_seed_gives_the_same_truth():
    first, second = (measured().batch(environment="c", stage="s", seed=0) for _ in range(2))
    assert first.episodes == second.episodes


def test_visible_branches_stay_within_their_budget():
    measurement = measured(max_branches=2)
    before = list(measurement.trajectories)
    branches = measurement.roll_out_visible_branches(1.0)
    batch = measurement.batch(environment="coins", stage="start", seed=0, branches=branches)
    assert branches
    assert 0 < batch.costs["branch_steps"] <= batch.costs["episode_steps"] == 16
    assert measurement.trajectories == before
    assert [e.start for e in batch.episodes[8:]] == [b.start for b in branches]
    assert not any(e.advantages for e in batch.episodes[8:])


def test_a_state_counts_as_often_as_advantages_contain_its_value():
    """Not the value of the first state of an episode, which ends no step."""
    episodes = [SimpleNamespace(is_scorable=True, states=own) for own in ("ab", "acb")]
    measured = Measurement(SimpleNamespace(collect=lambda specs: episodes), [], seed=0)
    weights = {key: state.weight for key, state in measured._states.items()}
    assert weights == {"a": 1 + 1, "b": 2 + 2, "c": 2}
