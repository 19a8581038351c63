import itertools

import gymnasium as gym
import numpy as np
import pytest

from agent_envs import AgentEnvsError
from agent_envs.envs.synthetic.bifurcation import RIGHT_DOORS
from tests.agent_envs.envs.playing import call, make, solve

ID = "AgentR1/SyntheticBifurcation-v0"
DOORS = ("north", "east", "south", "west")


def signs_and_decisive(env):
    data = env.unwrapped.task.data
    return data["signs"], data["decisive"]


def other_than(door):
    return DOORS[(DOORS.index(door) + 1) % len(DOORS)]


@pytest.mark.parametrize("decisive", range(4))
def test_only_the_door_of_the_decisive_room_decides(decisive):
    env = gym.make(ID, steps=4)
    task = next(t for t in range(200) if env.unwrapped.get_task(t).data["decisive"] == decisive)
    for wrong in range(4):
        env.reset(options={"task": task})
        steps = [
            call(env, "choose", door=other_than(RIGHT_DOORS[sign]) if i == wrong
                 else RIGHT_DOORS[sign])
            for i, sign in enumerate(signs_and_decisive(env)[0])
        ]  # fmt: skip
        rewards, info = [step[1] for step in steps], steps[-1][4]
        assert [step[2] for step in steps] == [False, False, False, True]
        assert rewards == [0, 0, 0, float(wrong != decisive)]
        assert info["metrics"]["success"] == float(wrong != decisive)
        assert info["metrics"]["right_doors"] == 0.75


def test_observations_differ_from_the_room_after_the_decisive_one_on():
    env = gym.make(ID)
    task = next(t for t in range(200) if env.unwrapped.get_task(t).data["decisive"] == 3)
    seen = []
    for wrong in (False, True):
        env.reset(options={"task": task})
        rights = [RIGHT_DOORS[sign] for sign in signs_and_decisive(env)[0]]
        doors = [other_than(door) if wrong else door for door in rights]
        seen.append([call(env, "choose", door=door)[0] for door in doors[:-1]])
    assert seen[0][:3] == seen[1][:3]  # rooms 2 to 4
    for right, wrong in zip(seen[0][3:], seen[1][3:], strict=True):  # rooms 5 to 8
        assert right.endswith(". You carry the key.")
        assert wrong.endswith(". Your hands are empty.")


def test_a_mistake_takes_a_turn_but_leaves_the_room_unchanged():
    env = make(ID, task=1)
    actions = env.unwrapped.reference_actions()
    env.step("hm")
    call(env, "choose", door="up")
    *_, last = [env.step(action) for action in actions]
    assert (last[1], last[2], last[4]["metrics"]["num_turns"]) == (1.0, True, 10.0)


def test_several_choices_in_one_turn_are_a_mistake_unless_they_are_allowed():
    for allowed in (False, True):
        env = make(ID, task=1, parallel_calls=allowed)
        actions = env.unwrapped.reference_actions()
        *_, info = env.step("\n".join([*actions, actions[0]]))  # one more than there are rooms
        assert info["metrics"]["success"] == float(allowed)
        assert info["metrics"]["num_invalid_actions"] == float(not allowed)


@pytest.mark.parametrize("steps", [2, 30])
def test_reference_actions_solve_any_number_of_rooms(steps):
    env = gym.make(ID, steps=steps, max_episode_steps=steps)
    for task in range(5):
        assert solve(env, task)[0] == 1.0


@pytest.mark.parametrize("steps", [2, 8])
def test_splits_share_no_sequence_of_signs(steps):
    sequences = [
        {gym.make(ID, steps=steps, split=split).unwrapped.get_task(t).data["signs"]
         for t in range(100)}
        for split in ("train", "test")
    ]  # fmt: skip
    assert not sequences[0] & sequences[1]
    if steps == 2:  # the sum of the signs, modulo 4, is 0 in one of four pairs
        assert [len(each) for each in sequences] == [12, 4]


def test_every_room_is_decisive_equally_often_and_says_nothing_about_it():
    env = gym.make(ID, steps=4).unwrapped
    tasks = [env.get_task(t).data for t in range(2000)]
    counts = np.bincount([task["decisive"] for task in tasks])
    assert counts == pytest.approx([500] * 4, abs=100)  # standard deviation 19
    at_sign = [sum(t["signs"][t["decisive"]] == sign for t in tasks) for sign in RIGHT_DOORS]
    assert at_sign == pytest.approx([500] * 4, abs=100)


def test_true_advantages_equal_a_brute_force_enumeration():
    # The policy has probability q of the right door, and (1 - q) / 3 of each other, in every room.
    q, steps = 0.4, 3
    env = make(ID, task=2, steps=steps)
    signs, _ = signs_and_decisive(env)
    outcomes = {}
    for doors in itertools.product(DOORS, repeat=steps):
        env.reset(options={"task": 2})
        outcomes[doors] = sum(call(env, "choose", door=door)[1] for door in doors)

    def value(prefix):
        rest = itertools.product(DOORS, repeat=steps - len(prefix))
        return sum(
            outcomes[prefix + end] * np.prod([
                q if door == RIGHT_DOORS[sign] else (1 - q) / 3
                for door, sign in zip(end, signs[len(prefix):], strict=True)
            ])
            for end in rest
        )  # fmt: skip

    for doors in outcomes:
        actions = [env.unwrapped.write_call("choose", door=door) for door in doors]
        expected = [value(doors[: t + 1]) - value(doors[:t]) for t in range(steps)]
        assert env.unwrapped.true_advantages(actions, q) == pytest.approx(expected)


def test_true_advantages_of_turns_without_exactly_one_choice():
    env = make(ID, task=2, steps=3, parallel_calls=True)
    actions = env.unwrapped.reference_actions()
    advantages = env.unwrapped.true_advantages
    assert sum(advantages(["hm", *actions], 0.4)) == pytest.approx(0.6)
    assert advantages(["hm", *actions], 0.4)[0] == 0.0
    assert advantages(["\n".join(actions)], 0.4) == pytest.approx([0.6])
    answer = env.unwrapped.write_answer("east")
    assert advantages([answer], 0.4) == pytest.approx([-0.4])  # gives up


@pytest.mark.parametrize("steps", [1, 31, 8.0])
def test_wrong_numbers_of_steps_are_errors(steps):
    with pytest.raises(AgentEnvsError, match=f"steps must be 2 to 30, not {steps}"):
        gym.make(ID, steps=steps)
