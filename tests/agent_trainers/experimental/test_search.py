import functools
import itertools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agent_envs.errors import SnapshotError
from agent_trainers.experimental.search.search import STRATEGIES, SearchRollout, score_states
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.policy import Generation
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition

LENGTH = 3
ORACLE = "oracle_best_of"
GUIDED = [name for name, uses_value in STRATEGIES.items() if uses_value]


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


def search(name, make_env=limited, *, on=None, budget=60, policy=None):
    rollout = SearchRollout(
        make_env, policy or Digits(), name, budget=budget, longest=LENGTH, value=Judge()
    )
    return rollout.collect(on or specs())


def actions(trajectories):
    return [[t.action for t in played.transitions] for played in trajectories]


@pytest.mark.parametrize("name", [*GUIDED, ORACLE])
def test_guided_search_solves_more_than_sampling(name):
    # there are 64 episodes: strategies that run whole ones need to see most of them
    budget = 900 if "best_of" in name else 60
    found = search(name, on=specs(4), budget=budget)
    sampled = search("sample", on=specs(4))
    assert sum(t.success for t in found) >= 3 > 1 >= sum(t.success for t in sampled)


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_the_oracle_uses_rewards(name):
    inverted = functools.partial(limited, pay=lambda is_solved: -float(is_solved))
    same = actions(search(name, inverted, budget=300)) == actions(search(name, budget=300))
    assert same == (name != ORACLE)


@pytest.mark.parametrize("name", STRATEGIES)
def test_searches_stay_within_the_budget_without_replayed_steps(name):
    steps = []
    found = search(name, functools.partial(limited, steps=steps), budget=13)
    num_steps = sum(t.metrics["search_steps"] for t in found)
    assert len(steps) > num_steps if name == "best_first" else len(steps) == num_steps
    for played in found:
        assert played.metrics["search_steps"] <= 13
        assert (played.stop_reason, played.start) == (StopReason.ANSWERED, 0)
        env = limited()
        env.reset(options={"task": int(played.task_id)})
        assert [env.step(t.action)[1] for t in played.transitions] == played.rewards
    whole = search("best_of", budget=12, on=specs(1))[0]
    assert whole.usage["calls"] == whole.metrics["search_steps"] == 12


def test_failures_fail_their_own_episode_only():
    def act(request):
        if request.messages[0]["content"] == "1":
            raise OSError("no server")
        return str(request.rng.integers(4))

    policy = Digits(act)
    policy.max_concurrency = 1
    found = search("best_first", policy=policy)
    assert [t.is_scorable for t in found] == [True, False, True]
    assert found[1].stop_reason is StopReason.POLICY_ERROR
    found = search("best_first", functools.partial(limited, fault=(1, 2)))
    assert [t.is_scorable for t in found] == [True, False, True]
    assert "broken" in found[1].error
    with pytest.raises(SnapshotError, match="the replayed messages"):
        search("best_first", lambda: TimeLimit(Drifting(), LENGTH))
    # results do not depend on the other episodes
    together = search("best_first", on=specs(4))
    assert actions(together)[2:3] == actions(search("best_first", on=specs(4)[2:3]))


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
