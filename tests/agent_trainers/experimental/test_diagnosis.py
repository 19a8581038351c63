import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.core.spaces import UnicodeText
from agent_envs.errors import ConfigurationError, DataError, ReplayError
from agent_trainers.experimental.diagnose.diagnosis import (
    NEVER_SOLVED,
    diagnose_by_policy,
    find_start,
    name_lost_step,
)
from agent_trainers.experimental.diagnose.oracle import diagnose_by_oracle
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec


class Corridor(gym.Env):
    """Walk to the end, three steps on; a pit ends nothing, but nobody gets out of it."""

    observation_space = action_space = UnicodeText()
    is_immediate = True
    num_tasks = 30
    length = 3
    max_steps = 6

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task = (options or {}).get("task", 0)
        self.place, self.taken, self.is_lost = 0, 0, False
        return "", self.info()

    def step(self, action):
        self.taken += 1
        self.is_lost |= action == "pit"
        self.place += {"on": 1, "back": -1}.get(action, 0) * (not self.is_lost)
        is_there = self.place >= self.length
        return "", float(is_there), is_there, self.taken >= self.max_steps, self.info()

    def info(self):
        text = f"task {self.task}, place {self.place}"  # a pit cannot be seen
        return {
            "messages": [{"role": "user", "content": text}],
            "task_id": f"corridor-{self.task}",
            "metrics": {"success": float(self.place >= self.length)},
        }

    def reference_actions(self):
        return ["on"] * self.length


class Clueless(Corridor):
    """Knows where one is: asked on the way, it says what is left."""

    def reference_actions(self):
        return ["on"] * (self.length - self.place)


def play(actions, make_env=Corridor, task=4):
    left = iter(actions)
    rollout = Rollout(make_env, ScriptedPolicy(lambda _: next(left)))
    spec = EpisodeSpec(task=task, seed=task, group_id=str(task), rng=np.random.default_rng(0))
    (trajectory,) = rollout.collect([spec])
    assert not trajectory.success
    return trajectory


@pytest.mark.parametrize(
    ("actions", "lost"),
    [
        (["on", "pit", "on", "on", "on", "on"], 1),
        (["wait", "on", "back", "pit", "on", "on"], 3),
        # no pit: six turns for three steps, so after the fourth wait two turns are too few
        (["wait", "wait", "wait", "wait", "on", "on"], 3),
        (["on", "on", "wait", "wait", "wait", "wait"], 5),
        (["pit", "pit", "on", "on", "on", "on"], 0),
    ],
)
@pytest.mark.parametrize("make_env", [Corridor, Clueless])
def test_the_oracle_names_the_step_after_which_it_cannot_win(make_env, actions, lost):
    (found,) = diagnose_by_oracle(make_env, [play(actions, make_env)]).episodes
    assert found.lost_step == lost
    assert [state.chance for state in found.states] == [1.0] * (lost + 1) + [0.0] * (5 - lost)
    assert found.drop == (1.0, 1.0, 1.0)


def test_the_actions_that_win_do_win():
    trajectory = play(["on", "wait", "pit", "on", "on", "on"])
    (found,) = diagnose_by_oracle(Corridor, [trajectory]).episodes
    assert [state.actions for state in found.states[3:]] == [(), (), ()]
    for t, state in enumerate(found.states[:3]):
        env = Corridor()
        env.reset(seed=4, options={"task": 4})
        for action in [*(x.action for x in trajectory.transitions[:t]), *state.actions]:
            *_, info = env.step(action)
        assert info["metrics"]["success"] == 1.0


def test_several_episodes_are_diagnosed_together_and_stay_as_they_were():
    episodes = [play(["pit"] + ["on"] * 5, task=1), play(["on"] + ["pit"] * 5, task=2)]
    before = [[t.action for t in e.transitions] for e in episodes]
    assert [d.lost_step for d in diagnose_by_oracle(Corridor, episodes).episodes] == [0, 1]
    assert [[t.action for t in e.transitions] for e in episodes] == before


@pytest.mark.parametrize("by", ["oracle", "policy"])
def test_the_cost_is_what_was_carried_out(by):
    class Counted(Corridor):
        num_steps = 0

        def step(self, action):
            Counted.num_steps += 1
            return super().step(action)

    episodes = [play(["on", "pit", "on", "on", "on", "on"]), play(["wait"] * 6, task=2)]
    policy = ScriptedPolicy(lambda _: "on")
    if by == "oracle":
        found = diagnose_by_oracle(Counted, episodes)
    else:
        found = diagnose_by_policy(Counted, policy, episodes, k=2, rng=np.random.default_rng(0))
    assert found.environment_steps == Counted.num_steps > 0
    assert (found.usage.calls > 0) == (by == "policy")


def test_a_wrong_answer_among_several_is_named_in_an_environment_of_ours():
    make_env = functools.partial(gym.make, "AgentR1/SyntheticLongHorizon-v0", max_episode_steps=9)
    env = make_env()
    env.reset(seed=3, options={"task": 3})
    actions = env.unwrapped.reference_actions()
    actions[5] = env.unwrapped.write_answer("nobody")
    (found,) = diagnose_by_oracle(make_env, [play(actions, make_env, task=3)]).episodes
    assert found.lost_step == 5


def test_a_policy_that_goes_on_gives_chances_with_wilsons_intervals():
    # walks on 9 times of 10, so from the first state it makes three of six with 0.999
    policy = ScriptedPolicy(lambda r: "on" if r.rng.random() < 0.9 else "wait")
    trajectory = play(["on", "pit", "on", "on", "on", "on"])
    rng = np.random.default_rng(0)
    (found,) = diagnose_by_policy(Corridor, policy, [trajectory], k=10, rng=rng).episodes
    assert found.lost_step == 1
    assert [state.num_tried for state in found.states] == [10] * 6
    assert found.states[1].chance == 1.0
    # Wilson: 10 of 10 is 0.7225 to 1, 0 of 10 is 0 to 0.2775
    assert found.states[1][3:5] == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert found.states[2][3:5] == pytest.approx((0.0, 0.2775), abs=1e-4)
    # by Newcombe the difference is at least one less 0.2775 times the root of two
    assert found.drop == pytest.approx((1.0, 0.6075, 1.0), abs=1e-4)


def test_nothing_is_named_where_whoever_goes_on_never_wins():
    trajectory = play(["pit"] * 6)
    policy = ScriptedPolicy(lambda _: "wait")
    rng = np.random.default_rng(0)
    (found,) = diagnose_by_policy(Corridor, policy, [trajectory], k=2, rng=rng).episodes
    assert found.lost_step is None
    assert found.note == NEVER_SOLVED


@pytest.mark.parametrize(
    ("chances", "lost"),
    [
        ([1.0, 1.0, 0.0, 0.0], 1),
        ([0.9, 0.8, 0.1, 0.05], 1),
        ([0.2, 0.9, 0.1], 1),  # a good step before the bad one
        ([0.8, 0.1, 0.3, 0.0], 0),  # (0.1 + 0.3) / 2 = 0.2 is below 0.4
        ([0.5, 0.5, 0.5], 2),
        ([0.0, 0.0], None),
        ([], None),
    ],
)
def test_a_step_is_named_after_which_the_chance_is_below_half_of_the_first(chances, lost):
    assert name_lost_step(chances, [10] * len(chances)) == lost


def test_the_noise_of_a_state_that_was_tried_little_names_no_step():
    # the 1 of one continuation among zeros of many: (1 + 0 * 40) / 41
    assert name_lost_step([1.0, 0.0, 1.0], [20, 40, 1]) == 0


def test_an_environment_without_reference_actions_has_no_oracle():
    class Silent(Corridor):
        reference_actions = None

    with pytest.raises(ConfigurationError, match="no reference_actions"):
        diagnose_by_oracle(Silent, [play(["pit"] * 6)])


def test_a_task_without_reference_actions_names_nothing():
    class Partial(Corridor):
        def reference_actions(self):
            raise NotImplementedError

    (found,) = diagnose_by_oracle(Partial, [play(["pit"] * 6)]).episodes
    assert (found.lost_step, found.note) == (None, NEVER_SOLVED)


def test_another_environment_than_the_one_that_was_played_is_refused():
    class Longer(Corridor):
        def info(self):
            return super().info() | {"messages": [{"role": "user", "content": "another"}]}

    with pytest.raises(ReplayError, match="after 0 of"):
        diagnose_by_oracle(Longer, [play(["pit"] * 6)])


class Brittle(Corridor):
    """Breaks at an action of one task."""

    fatal = "break"

    def step(self, action):
        if action == self.fatal and self.task == 4:
            raise RuntimeError("the corridor collapsed")
        return super().step(action)


def test_an_environment_that_breaks_ends_the_diagnosis_of_its_episode_alone():
    class Solid(Brittle):
        fatal = None

    fine = play(["on", "pit", "on", "on", "on", "on"], task=5)
    broken = play(["on", "break", "pit", "on", "on", "on"], Solid)
    found = diagnose_by_oracle(Brittle, [broken, fine]).episodes
    assert [each.lost_step for each in found] == [None, 1]
    assert "RuntimeError: the corridor collapsed" in found[0].note


def test_a_plan_that_breaks_the_environment_says_nothing_where_another_wins():
    class Nervous(Brittle):
        def reference_actions(self):
            return ["break", "on", "on", "on"]

    (found,) = diagnose_by_oracle(Nervous, [play(["on", "pit", "on", "on", "on", "on"])]).episodes
    # after the pit all plans lose, but the one that breaks: nobody knows what it would have done
    assert found.lost_step is None
    assert "RuntimeError: the corridor collapsed" in found.note
    won = play(["on", "on", "wait", "wait", "wait", "wait"])  # to the last step "on" wins
    (found,) = diagnose_by_oracle(Nervous, [won]).episodes
    assert found.lost_step == 5


def test_an_episode_that_cannot_be_repeated_does_not_keep_the_others_from_it():
    class Drifting(Corridor):
        def info(self):
            return super().info() | ({"messages": [{"role": "user", "content": "now here"}]}
                                     if self.task == 4 and self.place else {})  # fmt: skip

    drifted, fine = play(["on", "pit"] + ["on"] * 4), play(["on", "pit"] + ["on"] * 4, task=5)
    found = diagnose_by_oracle(Drifting, [drifted, fine]).episodes
    assert [each.lost_step for each in found] == [None, 1]
    assert "after 1 of" in found[0].note


def test_a_file_without_seeds_is_matched_by_the_id_and_the_first_state_of_its_task():
    played = play(["pit"] * 6, task=17)
    old = dataclasses.replace(played, seed=None, task=None, group_id="of my own")
    found = find_start(Corridor(), old)
    assert (found.task, found.seed) == (17, 17)
    assert find_start(Corridor(), played) is played
    unknown = dataclasses.replace(old, task_id="corridor-99")
    with pytest.raises(DataError, match="'corridor-99': the file has no seed"):
        find_start(Corridor(), unknown)
