import copy
import dataclasses
import functools
import itertools
import time

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit

from agent_envs.errors import RolloutError
from agent_trainers.experimental.search.search import Node, SearchRollout, readings_of, score_node
from agent_trainers.experimental.search.strategies import SEARCHES, SearchSettings
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.policy import Generation
from agent_trainers.rollout.episode import Episode, EpisodeSpec
from agent_trainers.trajectory import StopReason

LENGTH = 3
ORACLE = "oracle_best_of"
GUIDED = [name for name, kind in SEARCHES.items() if kind.uses_value]


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

    def snapshot(self):
        return self.task, list(self.digits)

    def restore(self, snapshot):
        self.task, self.digits = copy.deepcopy(snapshot)

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


class Unsaved(gym.Wrapper):
    """Unknown wrapper: states are reached by replay, steps have a deadline."""


class Judge:
    """Value: the share of right digits from the first on. Five tokens a reading."""

    def read(self, readings):
        values = []
        for messages, _, action in readings:
            digits = [m["content"] for m in messages if m["role"] == "assistant"]
            digits += [] if action is None else [action]
            right = solution(int(messages[0]["content"].split()[0]))
            is_right = [d == r for d, r in zip(digits, right, strict=False)]
            values.append([*is_right, False].index(False) / LENGTH)
        return values, [5] * len(readings)


def limited(**settings):
    return TimeLimit(Lock(**settings), LENGTH)


def unsaved(**settings):
    return Unsaved(limited(**settings))


def draw(request):
    return str(request.rng.integers(4))


def specs(count=3):
    return [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng(i))
        for i in range(count)
    ]


def search(name, make_env=limited, *, on=None, budget=60, policy=None, value=None, timeout=300.0,
           **settings):  # fmt: skip
    rollout = SearchRollout(
        make_env,
        policy or ScriptedPolicy(draw),
        SEARCHES[name].make_plan(SearchSettings(**settings)),
        budget,
        value=(value or Judge()) if SEARCHES[name].uses_value else None,
        step_timeout=timeout,
    )
    return rollout.collect(on or specs())


def actions(trajectories):
    return [[t.action for t in trajectory.transitions] for trajectory in trajectories]


@pytest.mark.parametrize("name", [*GUIDED, ORACLE])
def test_guided_search_solves_more_than_sampling(name):
    # there are 64 episodes: strategies that run whole ones need to see most of them
    budget = 300 if "best_of" in name else 60
    found = search(name, on=specs(4), budget=budget, candidates=12)
    sampled = search("sample", on=specs(4))
    assert sum(t.success for t in found) >= 3 > 1 >= sum(t.success for t in sampled)


@pytest.mark.parametrize("name", SEARCHES)
def test_only_the_oracle_uses_rewards(name):
    rewards = np.random.default_rng(0)
    noisy = functools.partial(limited, pay=lambda _: float(rewards.normal()))
    assert (actions(search(name, noisy)) == actions(search(name))) == (name != ORACLE)
    if name == ORACLE:
        inverted = functools.partial(limited, pay=lambda is_right: -float(is_right))
        assert all(t.return_ == 0 for t in search(name, inverted, budget=100))


@pytest.mark.parametrize(("make_env", "budget"), [
    *((limited, budget) for budget in (1, 13, 60)), *((unsaved, budget) for budget in (4, 13, 31)),
])  # fmt: skip
@pytest.mark.parametrize("name", SEARCHES)
def test_searches_stay_within_the_budget_including_replayed_steps(name, make_env, budget):
    steps = []
    found = search(name, functools.partial(make_env, steps=steps), budget=budget)
    assert len(steps) == sum(t.metrics["search_steps"] for t in found)
    assert all(t.metrics["search_steps"] <= budget for t in found)
    # an episode takes 3 steps; with replay before each, 1 + 2 + 3
    if budget >= 13:
        assert all(t.stop_reason is StopReason.ANSWERED for t in found)
    if budget == 1:
        assert all(t.stop_reason is StopReason.TURN_LIMIT and t.is_truncated for t in found)


@pytest.mark.parametrize("name", SEARCHES)
def test_an_overflow_in_the_first_state_ends_the_search(name):
    class Full(ScriptedPolicy):
        def generate(self, requests):
            return [Generation(text="", finish_reason="overflow") for _ in requests]

    (found,) = search(name, on=specs(1), policy=Full(draw), budget=9)
    assert found.stop_reason is StopReason.CONTEXT_OVERFLOW


def test_a_replayed_state_has_the_time_of_all_its_steps():
    class Slow(Lock):
        def step(self, action):
            time.sleep(0.2)
            return super().step(action)

    def run(seconds):
        make_env = lambda: Unsaved(TimeLimit(Slow(), LENGTH))  # noqa: E731
        (found,) = search("sample", make_env, on=specs(1), timeout=seconds)
        return found

    assert run(0.5).stop_reason is StopReason.ANSWERED
    assert run(0.05).stop_reason is StopReason.TIMEOUT


def test_usage_and_tokens_count_all_branches():
    lengths = []

    def act(request):
        lengths.append(sum(len(message["content"]) for message in request.messages))
        return draw(request)

    (found,) = search("beam", on=specs(1), policy=ScriptedPolicy(act), budget=40)
    usage = {"calls": len(lengths), "prompt_tokens": sum(lengths)}
    assert found.usage == usage | {"completion_tokens": len(lengths)}
    reads = found.metrics["search_steps"] + 1  # each new state, and the first
    assert found.metrics["search_tokens"] == sum(lengths) + len(lengths) + 5 * reads


@pytest.mark.parametrize("name", ["vote", "beam"])
def test_searches_without_snapshots_find_the_same_by_replay(name):
    by_replay = search(name, unsaved, candidates=2, budget=150)
    assert {t.stop_reason for t in by_replay} == {StopReason.ANSWERED}
    if name != "vote":  # a vote over fewer episodes, because each costs more steps
        assert actions(by_replay) == actions(search(name, candidates=2, budget=150))
    for trajectory in by_replay:
        env = limited()
        env.reset(options={"task": int(trajectory.task_id)})
        rewards = [env.step(t.action)[1] for t in trajectory.transitions]
        assert rewards == trajectory.rewards


@pytest.mark.parametrize("name", ["sample", "greedy", "rerank"])
def test_a_single_episode_needs_no_replay(name):
    for make_env in (unsaved, lambda: Unsaved(TimeLimit(Drifting(), LENGTH))):
        found = search(name, make_env, budget=LENGTH, on=specs(20))
        assert [t.stop_reason for t in found] == [StopReason.ANSWERED] * 20
        assert {t.metrics["search_steps"] for t in found} == {LENGTH}


def test_a_state_that_replay_does_not_reach_fails_the_search():
    for trajectory in search("beam", lambda: Unsaved(TimeLimit(Drifting(), LENGTH))):
        assert not trajectory.is_scorable
        assert "the replayed messages" in trajectory.error


def test_at_most_max_concurrency_environments_are_made(monkeypatch):
    monkeypatch.setattr("agent_trainers.experimental.search.search.MAX_CONCURRENCY", 2)
    made = []
    few = search("beam", lambda: made.append(1) or unsaved(), on=specs(5))
    assert len(made) <= 2
    monkeypatch.undo()
    assert actions(few) == actions(search("beam", unsaved, on=specs(5)))


def test_a_value_that_is_nan_is_an_error():
    class Broken(Judge):
        def read(self, readings):
            values, counts = super().read(readings)
            return [float("nan")] * len(values), counts

    for name in GUIDED:
        with pytest.raises(RolloutError, match="NaN"):
            search(name, on=specs(1), value=Broken())


def test_results_depend_neither_on_other_episodes_nor_on_the_order_of_answers():
    class Served(ScriptedPolicy):
        max_concurrency = 3

        def generate(self, requests):
            assert len(requests) == 1
            time.sleep(0.002 * int(requests[0].episode_id % 3))
            return super().generate(requests)

    together = actions(search("beam", on=specs(4)))
    assert together[2] == actions(search("beam", on=specs(4)[2:3]))[0]
    assert together == actions(search("beam", on=specs(4), policy=Served(draw)))


def test_failures_of_policy_and_environment_fail_their_own_episode_only():
    def act(request):
        if request.messages[0]["content"] == "1":
            raise OSError("no server")
        return draw(request)

    policy = ScriptedPolicy(act)
    policy.max_concurrency = 3
    found = search("beam", policy=policy)
    assert [t.is_scorable for t in found] == [True, False, True]
    assert found[1].stop_reason is StopReason.POLICY_ERROR
    found = search("beam", functools.partial(limited, fault=(1, 2)))
    assert [t.is_scorable for t in found] == [True, False, True]
    assert found[1].stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "broken" in found[1].error
    assert found[1].metrics["search_steps"] > 0


def test_vote_returns_the_most_frequent_answer():
    answers = iter("000 111 111 222".replace(" ", ""))
    # 12 steps: four episodes of three
    policy = ScriptedPolicy(lambda _: next(answers))
    (found,) = search("vote", on=specs(1), policy=policy, budget=12)
    assert actions([found]) == [["1"] * 3]
    assert found.metrics["search_steps"] == 12


@dataclasses.dataclass
class _Step:
    action: str = "a"
    reward: float = 0.0


def node(*contents, offset=0.0, stop_reason=None, context=None):
    """Return a state with messages of these contents, reached by one step."""
    info = {"messages": [{"role": "user", "content": c} for c in contents], "context": context}
    episode = Episode(0, specs(1)[0], info=info, stop_reason=stop_reason)
    episode.transitions = [_Step()]
    return Node(episode, offset=offset)


@pytest.mark.parametrize(
    ("child", "num_read", "values", "expected"),
    [
        # the same conversation: its value, and the gain of earlier conversations
        pytest.param(node("q", "a", "r"), 1, [0.7], (0.9, 0.2), id="continues"),
        pytest.param(node("r", context={"reason": "window"}), 1, [0.7], (0.9, 0.2), id="rewritten"),
        # another one: 0.2 + 0.7 after the action; 0.4 is where the new conversation starts
        pytest.param(node("next"), 2, [0.7, 0.4], (0.9, 0.5), id="new conversation"),
        pytest.param(node("q", stop_reason=StopReason.ANSWERED), 1, [0.7], (0.9, 0.2), id="ends"),
    ],
)
def test_scores_add_up_over_conversations(child, num_read, values, expected):
    parent = node("q", offset=0.2)
    assert len(readings_of(parent, child)) == num_read
    score_node(parent, child, values)
    assert (child.score, child.offset) == pytest.approx(expected)


def test_files_are_restored_between_branches():
    class LastAction:
        """Value: prefers the reference actions to the harmful one."""

        def read(self, readings):
            return [-float("rm -rf" in str(r.messages) + str(r.action)) for r in readings], [
                1
            ] * len(readings)

    make_env = functools.partial(gym.make, "AgentR1/CommandLine-v0", kinds="rename")
    env = make_env().unwrapped
    env.reset(options={"task": 0})
    *right, done = env.reference_actions()
    harm = env.write_call("shell", command="rm -rf *")

    def act(request):
        turns = sum(message["role"] == "assistant" for message in request.messages)
        return [*right, done][min(turns, len(right))] if request.rng.random() < 0.5 else harm

    (found,) = search("beam", make_env, on=specs(1), policy=ScriptedPolicy(act), value=LastAction())
    assert found.success
    assert harm not in actions([found])[0]
