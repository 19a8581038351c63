from dataclasses import dataclass, replace

import numpy as np
import pytest

from agent_trainers.algorithms.advantages import estimate
from agent_trainers.algorithms.roles import estimate_by_role, take_apart
from tests.agent_trainers.made import Episode


@dataclass
class Played(Episode):
    roles: list = None
    reward_owners: list = None
    frozen_roles: frozenset = frozenset()


def play(rewards, roles, **changes):
    each = {"states": ["x"] * len(rewards), "reward_owners": [{}] * len(rewards)} | changes
    return Played("g", rewards, roles=roles, **each)


def compare(episodes, estimator="grpo_step", **settings):
    return estimate_by_role(lambda parts: estimate(estimator, parts, **settings), episodes)


PLANNED = play([0.0, 0.25, 0.0, 1.0], ["planner", "executor", "executor", "planner"])


def test_each_role_earns_what_the_episode_earned_from_its_step_on():
    planner, executor = take_apart(PLANNED)
    # the planner's first step: 0 + what came before its next one; the second: 1
    assert planner.rewards == [0.25, 1.0]
    assert executor.rewards == [0.25, 1.0]  # the last reward comes after its last step
    assert planner.reward_terms == executor.reward_terms == [{"reward": 0.25}, {"reward": 1.0}]
    assert (planner.roles, executor.roles) == (["planner"] * 2, ["executor"] * 2)
    _, critic = take_apart(play([1.0, 0.0, 0.5], ["solver", "critic", "solver"]))
    assert critic.rewards == [0.5]  # no part in what came before it
    assert (planner.group_id, executor.group_id) == ("g/planner", "g/executor")


def test_a_reward_of_a_roles_own_counts_for_it_alone():
    episode = play([0.0, -0.5, 1.0], ["solver", "critic", "solver"])
    episode = replace(episode, reward_owners=[{}, {"reward": "critic"}, {"reward": "solver"}])
    solver, critic = take_apart(episode)
    assert (solver.rewards, critic.rewards) == ([0.0, 1.0], [-0.5])


def test_a_step_may_hold_shared_terms_and_terms_of_its_role():
    episode = play([0.0, 1.25], ["critic", "solver"])
    terms = [{}, {"outcome": 1.0, "progress": 0.25}]
    episode = replace(episode, reward_terms=terms, reward_owners=[{}, {"progress": "solver"}])
    critic, solver = take_apart(episode)
    assert (critic.rewards, solver.rewards) == ([1.0], [1.25])
    assert (critic.reward_terms, solver.reward_terms) == ([{"outcome": 1.0}], [terms[1]])


def test_each_role_has_its_own_baseline():
    # The outcome comes with the solver's verdict; a wrong review costs the critic .5.
    owners = [{}, {"reward": "critic"}]
    episodes = [
        play([1.0, 0.0], ["solver", "critic"], reward_owners=owners),
        play([0.0, -0.5], ["solver", "critic"], reward_owners=owners),
    ]
    # Means: solver 1/2, critic -1/4.
    assert [a.tolist() for a in compare(episodes, "dr_grpo")] == [[0.5, 0.25], [-0.5, -0.25]]


def test_roles_are_compared_with_their_own_kind():
    # Planners: returns 1 and 0; executors: of the first episode 1, of the second 0 and 0.
    episodes = [
        play([0.0, 1.0], ["planner", "executor"]),
        play([0.0, 0.0, 0.0], ["planner", "executor", "executor"]),
    ]
    first, second = compare(episodes, "dr_grpo")
    assert first.tolist() == [0.5, 0.5]
    assert second.tolist() == [-0.5, -0.5, -0.5]
    alone = estimate("grpo_step", [take_apart(e)[1] for e in episodes])
    assert compare(episodes)[1][1:].tolist() == alone[1].tolist()


def test_frozen_roles_and_unscorable_episodes_are_compared_with_nobody():
    user = frozenset({"user"})
    episodes = [
        play([0.0, 1.0], ["user", "agent"], frozen_roles=user),
        play([0.0, 0.0], ["user", "agent"], frozen_roles=user),
        play([9.0, 9.0], ["user", "agent"], frozen_roles=user, is_scorable=False),
    ]
    first, second, third = compare(episodes, "dr_grpo")
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0.0, 0.5], [0.0, -0.5], [])


def test_an_estimator_that_counts_tokens_is_refused():
    with pytest.raises(ValueError, match="7 input values"):
        estimate_by_role(lambda parts: [np.zeros(7)] * len(parts), [PLANNED])


def test_a_branch_leaves_its_episode_at_a_step_of_each_role():
    branch = play([0.0] * 5, ["planner", "executor", "executor", "planner", "executor"], start=2)
    planner, executor = take_apart(branch)
    assert (planner.start, executor.start) == (1, 1)  # of 0, 3 and of 1, 2, 4
