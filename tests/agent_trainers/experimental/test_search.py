import functools
import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agent_envs.errors import SnapshotError
from agent_trainers.experimental.search import choose, num_steps, score_states
from agent_trainers.experimental.search import search as make_attempts
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.policy import Generation
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition

LENGTH = 3


def solution(task):
    return [str((task + place) % 4) for place in range(LENGTH)]


class Lock(gym.Env):
    """Opens if all digits are right; only the final reward tells."""

    is_immediate = True

    def __init__(self, pay=float, fault=None, steps=None):
        self._pay, self._fault, self._steps = pay, fault, [] if steps is None else steps

    def reset(self, *, seed=None, options=None):
        self.task, self.digits = options["task"], []
        return "go", self._info()

    def step(self, action):
        if self._fault == (self.task, len(self.digits)):
            raise RuntimeError("broken")
        self._steps.append(action)
        self.digits.append(action)
        is_over = len(self.digits) == LENGTH
        reward = self._pay(is_over and self.digits == solution(self.task))
        return "on", reward, is_over, False, self._info()

    def _info(self):
        messages = [{"role": "user", "content": f"{self.task}"}]
        for digit in self.digits:
            messages += [{"role": "assistant", "content": digit}, {"role": "user", "content": "on"}]
        success = float(self.digits == solution(self.task))
        action = {"kind": "answer", "answer": "".join(self.digits)}
        return {"messages": messages, "tools": [], "task_id": str(self.task), "action": action,
                "metrics": {"success": success}}  # fmt: skip


class Drifting(Lock):
    """Shows something else each time."""

    counter = itertools.count()

    def _info(self):
        info = super()._info()
        info["messages"][-1]["content"] += f" {next(self.counter)}"
        return info


class Digits(ScriptedPolicy):
    """Draws a digit. Its tokens: the task, and a token for each digit."""

    def __init__(self, act=lambda request: str(request.rng.integers(4))):
        super().__init__(act)

    def generate(self, requests):
        def ids(request):
            digits = [m["content"] for m in request.messages if m["role"] == "assistant"]
            return [int(request.messages[0]["content"].split()[0]), *map(int, digits)]

        return [
            Generation(text=each.text, prompt_ids=ids(request), completion_ids=[int(each.text)],
                       logprobs=[0.0])
            for request, each in zip(requests, super().generate(requests), strict=True)
        ]  # fmt: skip


class Judge:
    """Value: the share of right digits from the first on."""

    def values(self, sequences):
        found = []
        for task, *digits in sequences:
            is_right = [str(d) == r for d, r in zip(digits, solution(task), strict=False)]
            found.append([*is_right, False].index(False) / LENGTH)
        return found


def limited(**settings):
    return TimeLimit(Lock(**settings), LENGTH)


def specs(count=3):
    return [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng(i))
        for i in range(count)
    ]


def search(guide, make_env=limited, *, on=None, budget=60, policy=None):
    """Return the attempts at each task; `guide` is the value of a best-first search."""
    rollout = Rollout(make_env, policy or Digits())
    return make_attempts(rollout, on or specs(), budget=budget, longest=LENGTH, value=guide)


def actions(searches):
    return [[t.action for each in own for t in each.transitions] for own in searches]


def by_value(attempt):
    return score_states(attempt, Judge())[-1]


@pytest.mark.parametrize(("guide", "score", "budget"), [
    # there are 64 episodes: strategies that run whole ones need to see most of them
    pytest.param(None, by_value, 900, id="best_of"),
    pytest.param(None, lambda attempt: attempt.return_, 900, id="oracle_best_of"),
    pytest.param(Judge(), by_value, 60, id="best_first"),
])  # fmt: skip
def test_search_solves_more_than_sampling(guide, score, budget):
    found = search(guide, on=specs(4), budget=budget)
    assert sum(choose(own, score).success for own in found) >= 3
    assert sum(own[0].success for own in found) <= 1


def test_rewards_do_not_guide_a_search():
    inverted = functools.partial(limited, pay=lambda is_solved: -float(is_solved))
    assert actions(search(Judge(), inverted)) == actions(search(Judge()))


@pytest.mark.parametrize("guide", [None, Judge()])
def test_searches_stay_within_the_budget_without_replayed_steps(guide):
    steps = []
    found = search(guide, functools.partial(limited, steps=steps), budget=13)
    assert all(num_steps(own) <= 13 for own in found)
    total = sum(map(num_steps, found))
    assert len(steps) > total if guide else len(steps) == total
    for attempt in (each for own in found for each in own):
        assert attempt.stop_reason is StopReason.ANSWERED
        env = limited()
        env.reset(options={"task": int(attempt.task_id)})
        assert [env.step(t.action)[1] for t in attempt.transitions] == attempt.rewards
    (alone,) = search(None, budget=12, on=specs(1))
    assert sum(attempt.usage["calls"] for attempt in alone) == num_steps(alone) == 12


def test_failures_fail_their_own_task_only():
    def act(request):
        if request.messages[0]["content"] == "1":
            raise OSError("no server")
        return str(request.rng.integers(4))

    policy = Digits(act)
    policy.max_concurrency = 1
    broken = functools.partial(limited, fault=(1, 2))
    for settings, reason in (
        ({"policy": policy}, StopReason.POLICY_ERROR),
        ({"make_env": broken}, StopReason.ENVIRONMENT_ERROR),
    ):
        chosen = [choose(own, by_value) for own in search(Judge(), **settings)]
        assert [each.is_scorable for each in chosen] == [True, False, True]
        assert chosen[1].stop_reason is reason
    with pytest.raises(SnapshotError, match="the replayed messages"):
        search(Judge(), lambda: TimeLimit(Drifting(), LENGTH))
    # results do not depend on the other episodes
    together = search(Judge(), on=specs(4))
    assert actions(together)[2:3] == actions(search(Judge(), on=specs(4)[2:3]))


@pytest.mark.parametrize(("second", "context", "scores"), [
    # values 0.1, 0.2 of the first state and action, 0.4, 0.7 of the second
    pytest.param(["q", "a", "r"], None, [0.1, 0.4, 0.7], id="continues"),
    pytest.param(["r"], {"reason": "window"}, [0.1, 0.4, 0.7], id="rewritten"),
    # another one begins at 0.4: what it adds to it counts from 0.2 on
    pytest.param(["next"], None, [0.1, 0.2, 0.5], id="new conversation"),
])  # fmt: skip
def test_scores_add_up_over_conversations(second, context, scores):
    def step(contents, number, info):
        messages = [{"role": "user", "content": content} for content in contents]
        return transition([number], [9], messages=messages, info=info)

    table = {(0,): 0.1, (0, 9): 0.2, (1,): 0.4, (1, 9): 0.7}
    value = SimpleNamespace(values=lambda sequences: [table[tuple(s)] for s in sequences])
    played = trajectory(step(["q"], 0, {"context": context}), step(second, 1, {}))
    assert score_states(played, value) == pytest.approx(scores)
