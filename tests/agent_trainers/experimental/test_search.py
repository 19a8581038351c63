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
from agent_trainers.experimental.search.strategies import REWARDS, SEARCHES, SearchSettings
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.policies.generation import Generation
from agent_trainers.rollout.collector import EpisodeSpec
from agent_trainers.rollout.episode import Episode
from agent_trainers.trajectory import StopReason

LENGTH = 3
ORACLES = [name for name, kind in SEARCHES.items() if kind.needs == REWARDS]
OTHERS = [name for name in SEARCHES if name not in ORACLES]
GUIDED = [name for name, kind in SEARCHES.items() if kind.uses_value]


def solution(task):
    return [str((task + place) % 4) for place in range(LENGTH)]


class Lock(gym.Env):
    """Opens if all digits are right, which is said by nothing but the reward at the end."""

    is_immediate = True

    def __init__(self, pay=float, fault=None):
        self._pay, self._fault = pay, fault

    def reset(self, *, seed=None, options=None):
        self.task, self.digits = options["task"], []
        return "go", self._info()

    def step(self, action):
        if self._fault == (self.task, len(self.digits)):
            raise RuntimeError("broken")
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


class Unsaved(gym.Wrapper):
    """A wrapper that nobody knows: states are reached by replay, steps are taken in threads."""


class Judge:
    """Knows the solution: the share of right digits from the first on. Counts what it reads."""

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


def draw(request):
    return str(request.rng.integers(4))


def specs(count=3):
    return [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng(i))
        for i in range(count)
    ]


def search(name, make_env=limited, played=None, budget=None, **settings):
    plan = SEARCHES[name].make_plan(SearchSettings(**settings))
    value = Judge() if SEARCHES[name].uses_value else None
    rollout = SearchRollout(make_env, ScriptedPolicy(draw), plan, budget or 60, value=value)
    return rollout.collect(played or specs())


def actions(trajectories):
    return [[t.action for t in trajectory.transitions] for trajectory in trajectories]


@pytest.mark.parametrize("name", [*GUIDED, "oracle_best_of"])
def test_a_search_that_is_told_what_is_good_finds_what_chance_does_not(name):
    # 64 episodes there are: most are seen by those that play whole ones
    budget = 300 if "best_of" in name or "oracle" in name else 60
    found = search(name, played=specs(4), budget=budget, candidates=12)
    chance = search("sample", played=specs(4))
    assert sum(t.success for t in found) >= 3 > 1 >= sum(t.success for t in chance)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_environment_pays_changes_nothing_unless_an_oracle_looks(name):
    payments = np.random.default_rng(0)
    noisy = functools.partial(limited, pay=lambda _: float(payments.normal()))
    assert actions(search(name, noisy)) == actions(search(name))


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_goes_by_what_the_environment_pays(name):
    spiteful = functools.partial(limited, pay=lambda is_right: -float(is_right))
    assert all(t.return_ == 0 for t in search(name, spiteful, budget=100))


class Counted(Lock):
    """Notes every step that is taken in it."""

    def __init__(self, steps):
        super().__init__()
        self._taken = steps

    def step(self, action):
        self._taken.append(action)
        return super().step(action)


@pytest.mark.parametrize("budget", [1, 13, 60])
@pytest.mark.parametrize("name", SEARCHES)
def test_no_search_takes_more_steps_than_its_budget(name, budget):
    steps = []
    found = search(name, lambda: TimeLimit(Counted(steps), LENGTH), budget=budget)
    assert len(steps) == sum(t.metrics["search_steps"] for t in found) <= 3 * budget
    assert all(t.metrics["search_steps"] <= budget for t in found)
    if budget >= 13:  # room for an episode is kept
        assert all(t.stop_reason is StopReason.ANSWERED for t in found)
    else:
        assert all(t.stop_reason is StopReason.TURN_LIMIT and t.is_truncated for t in found)


@pytest.mark.parametrize("budget", [4, 6, 13, 20, 31])
@pytest.mark.parametrize("name", SEARCHES)
def test_steps_that_are_taken_again_stay_within_the_budget_too(name, budget):
    make_env = lambda: Unsaved(TimeLimit(Counted(steps), LENGTH))  # noqa: E731
    steps = []
    found = search(name, make_env, budget=budget)
    assert len(steps) == sum(t.metrics["search_steps"] for t in found)
    assert all(t.metrics["search_steps"] <= budget for t in found)
    if budget >= 6:  # an episode: 1, 2 and 3 steps
        assert all(t.stop_reason is StopReason.ANSWERED for t in found)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_first_state_that_does_not_fit_the_policy_ends_the_search(name):
    class Full(ScriptedPolicy):
        def generate(self, requests):
            return [Generation(text="", finish_reason="overflow") for _ in requests]

    plan = SEARCHES[name].make_plan(SearchSettings())
    value = Judge() if SEARCHES[name].uses_value else None
    rollout = SearchRollout(limited, Full(draw), plan, 9, value=value)
    (found,) = rollout.collect(specs(1))
    assert found.stop_reason is StopReason.CONTEXT_OVERFLOW


def test_a_state_that_is_reached_by_many_steps_may_take_the_time_of_each():
    class Slow(Lock):
        def step(self, action):
            time.sleep(0.2)
            return super().step(action)

    def play(seconds):
        plan = SEARCHES["sample"].make_plan(SearchSettings())
        make_env = lambda: Unsaved(TimeLimit(Slow(), LENGTH))  # noqa: E731
        rollout = SearchRollout(make_env, ScriptedPolicy(draw), plan, 60, step_timeout=seconds)
        (found,) = rollout.collect(specs(1))
        return found

    assert play(0.5).stop_reason is StopReason.ANSWERED  # the last of them after two others
    assert play(0.05).stop_reason is StopReason.TIMEOUT


def test_all_that_a_search_asks_for_is_counted():
    asked = []

    def act(request):
        asked.append(sum(len(message["content"]) for message in request.messages))
        return draw(request)

    plan = SEARCHES["beam"].make_plan(SearchSettings())
    rollout = SearchRollout(limited, ScriptedPolicy(act), plan, 40, value=Judge())
    (found,) = rollout.collect(specs(1))
    usage = {"calls": len(asked), "prompt_tokens": sum(asked), "completion_tokens": len(asked)}
    assert found.usage == usage
    reads = found.metrics["search_steps"] + 1  # each new state, and the first
    assert found.metrics["search_tokens"] == sum(asked) + len(asked) + 5 * reads


@pytest.mark.parametrize("name", ["vote", "beam"])
def test_where_there_are_no_snapshots_the_same_is_found_by_replay(name):
    settings = {"candidates": 2, "budget": 150}
    by_replay = search(name, lambda: Unsaved(limited()), **settings)
    assert {t.stop_reason for t in by_replay} == {StopReason.ANSWERED}
    if name != "vote":  # for which steps that are taken again leave fewer episodes
        assert actions(by_replay) == actions(search(name, **settings))
    for trajectory in by_replay:
        env = limited()
        env.reset(options={"task": int(trajectory.task_id)})
        rewards = [env.step(t.action)[1] for t in trajectory.transitions]
        assert rewards == trajectory.rewards


class Moody(Lock):
    """Shows something else each time."""

    moods = itertools.count()

    def _info(self):
        info = super()._info()
        info["messages"][-1]["content"] += f" {next(self.moods)}"
        return info


@pytest.mark.parametrize("name", ["sample", "greedy", "rerank"])
def test_an_episode_that_is_only_played_needs_no_state_again(name):
    for make_env in (lambda: Unsaved(limited()), lambda: Unsaved(TimeLimit(Moody(), LENGTH))):
        found = search(name, make_env, budget=LENGTH, played=specs(20))
        assert [t.stop_reason for t in found] == [StopReason.ANSWERED] * 20
        assert {t.metrics["search_steps"] for t in found} == {LENGTH}
    # one step at a time, and each environment where it was left
    assert actions(search(name, lambda: Unsaved(limited()))) == actions(search(name))


class Unsteady(Unsaved):
    """Takes now less time for a step, now more."""

    pauses = itertools.cycle([0.0, 0.03, 0.002, 0.0, 0.015, 0.001, 0.0])

    def step(self, action):
        time.sleep(next(self.pauses))
        return super().step(action)


@pytest.mark.parametrize("kind", [Unsaved, Unsteady])
def test_without_snapshots_there_are_no_more_environments_than_allowed(monkeypatch, kind):
    monkeypatch.setattr("agent_trainers.experimental.search.search.MAX_CONCURRENCY", 2)
    made = []
    make_env = lambda: made.append(1) or kind(limited())  # noqa: E731
    few = search("beam", make_env, played=specs(5))
    # an environment stays where each of two searches is, two others go back for it
    assert len(made) <= 4
    assert actions(few) == actions(search("beam", played=specs(5), budget=60))


def test_a_vote_without_snapshots_counts_each_episode_once():
    found = search("vote", lambda: Unsaved(limited()), budget=9)
    assert [t.metrics["search_steps"] for t in found] == [9] * 3
    assert actions(found) == actions(search("vote", budget=9))


def test_a_value_that_is_no_number_ends_the_search():
    class Broken(Judge):
        def read(self, readings):
            values, counts = super().read(readings)
            return [float("nan")] * len(values), counts

    for name in GUIDED:
        plan = SEARCHES[name].make_plan(SearchSettings())
        rollout = SearchRollout(limited, ScriptedPolicy(draw), plan, 9, value=Broken())
        with pytest.raises(RolloutError, match="NaN"):
            rollout.collect(specs(1))


@pytest.mark.parametrize("name", ["beam"])
def test_a_state_that_no_replay_comes_to_again_ends_the_search(name):
    played = search(name, lambda: Unsaved(TimeLimit(Moody(), LENGTH)))
    for trajectory in played:
        assert not trajectory.is_scorable
        assert "the replayed messages" in trajectory.error


def test_what_is_found_depends_neither_on_other_episodes_nor_on_the_time_steps_take():
    together = search("beam", played=specs(4))
    alone = search("beam", played=specs(4)[2:3])
    assert actions(together)[2] == actions(alone)[0]


def test_a_policy_that_answers_in_any_order_finds_the_same():
    class Served(ScriptedPolicy):
        max_concurrency = 3

        def generate(self, requests):
            assert len(requests) == 1
            time.sleep(0.002 * int(requests[0].episode_id % 3))
            return super().generate(requests)

    plan = SEARCHES["beam"].make_plan(SearchSettings())
    rollout = SearchRollout(limited, Served(draw), plan, 60, value=Judge())
    assert actions(rollout.collect(specs())) == actions(search("beam"))


def test_a_policy_that_fails_ends_the_search_as_a_fault():
    def act(request):
        if request.messages[0]["content"] == "1":
            raise OSError("no server")
        return draw(request)

    policy = ScriptedPolicy(act)
    policy.max_concurrency = 3
    plan = SEARCHES["beam"].make_plan(SearchSettings())
    found = SearchRollout(limited, policy, plan, 9, value=Judge()).collect(specs())
    assert [t.is_scorable for t in found] == [True, False, True]
    assert found[1].stop_reason is StopReason.POLICY_ERROR


def test_a_fault_ends_the_search_of_its_episode_alone():
    faulty = functools.partial(limited, fault=(1, 2))
    found = search("beam", faulty)
    assert [t.stop_reason for t in found] == [
        StopReason.ANSWERED, StopReason.ENVIRONMENT_ERROR, StopReason.ANSWERED
    ]  # fmt: skip
    assert "broken" in found[1].error
    assert found[1].metrics["search_steps"] > 0


def test_the_vote_is_for_the_answer_given_most_often():
    said = iter("000 111 111 222".replace(" ", ""))
    plan = SEARCHES["vote"].make_plan(SearchSettings())
    policy = ScriptedPolicy(lambda _: next(said))
    # 12 steps: four episodes of three
    (found,) = SearchRollout(limited, policy, plan, 12).collect(specs(1))
    assert actions([found]) == [["1"] * 3]
    assert found.metrics["search_steps"] == 12


def node(*contents, offset=0.0, stop_reason=None, context=None):
    """Return a state with messages of these contents, reached by one step."""
    spec = specs(1)[0]
    info = {"messages": [{"role": "user", "content": c} for c in contents], "context": context}
    episode = Episode(0, spec, info=info, stop_reason=stop_reason)
    episode.transitions = [_Step()]
    return Node(episode, offset=offset)


@dataclasses.dataclass
class _Step:
    action: str = "a"
    reward: float = 0.0


@pytest.mark.parametrize(
    ("child", "num_read", "values", "expected"),
    [
        # the same conversation: the value of the state, and what was gained in those before
        pytest.param(node("q", "a", "r"), 1, [0.7], (0.9, 0.2), id="goes on"),
        pytest.param(node("r", context={"reason": "window"}), 1, [0.7], (0.9, 0.2), id="rewritten"),
        # a new one: 0.2 + 0.7 after the action; the new state's 0.4 is only where it begins
        pytest.param(node("next"), 2, [0.7, 0.4], (0.9, 0.5), id="begins anew"),
        pytest.param(node("q", stop_reason=StopReason.ANSWERED), 1, [0.7], (0.9, 0.2), id="ends"),
    ],
)
def test_a_score_goes_on_where_a_conversation_begins_anew(child, num_read, values, expected):
    parent = node("q", offset=0.2)
    assert len(readings_of(parent, child)) == num_read
    score_node(parent, child, values)
    assert (child.score, child.offset) == pytest.approx(expected)


def test_a_folder_is_set_back_between_branches():
    make_env = functools.partial(gym.make, "AgentR1/CommandLine-v0", kinds="rename")
    env = make_env().unwrapped
    env.reset(options={"task": 0})
    *right, done = env.reference_actions()
    harm = env.write_call("shell", command="rm -rf *")

    def act(request):
        turns = sum(message["role"] == "assistant" for message in request.messages)
        return [*right, done][min(turns, len(right))] if request.rng.random() < 0.5 else harm

    settings = SearchSettings(candidates=4)
    plan = SEARCHES["beam"].make_plan(settings)
    rollout = SearchRollout(make_env, ScriptedPolicy(act), plan, 60)
    (found,) = rollout.collect(specs(1))
    rollout.close()
    assert found.success
    assert harm not in actions([found])[0]
