"""Several calls in one turn: concurrent, with results in order, each rewarded."""

import json
import sys
import threading
import time

import gymnasium as gym
import pytest

from agent_envs import Task, Tool, ToolEnv, format_term, tool
from agent_envs.core.rewards import noted_terms
from agent_envs.formats.openai_format import FunctionCall, write_message


class Shop(ToolEnv):
    """Each found thing is rewarded."""

    reward_functions = {**noted_terms("found"), "format": format_term}  # noqa: RUF012
    default_rewards = {"found": 1.0, "format": 0.5}  # noqa: RUF012

    def get_task(self, index):
        return Task(id="shop", question="Find things.", answers=())

    def begin_episode(self):
        self.seen = []

    def on_result(self, action, result):
        self.seen.append(action.arguments)
        self.noted["found"] = float(result.content.startswith("found"))


@tool
def find(thing: str) -> str:
    """Find something."""
    return f"found {thing}"


@tool
def fail() -> str:
    """Fail."""
    raise RuntimeError("no")


@tool
def leave() -> str:
    """Leave Python."""
    sys.exit(3)


def turn(env, *calls):
    """Write a turn with several calls in the environment's format."""
    if env.tool_format != "openai":
        return "\n".join(env.write_call(name, **arguments) for name, arguments in calls)
    return write_message("", [
        FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls
    ])  # fmt: skip


ONE_AND_TWO = [("find", {"thing": "1"}), ("find", {"thing": "2"})]


@pytest.mark.parametrize(
    ("name", "replies"),
    [
        ("hermes", [("tool", "found 1"), ("tool", "found 2")]),
        ("openai", [("tool", "found 1"), ("tool", "found 2")]),
        ("tags", [("user", "<information>found 1</information>\n\n"
                           "<information>found 2</information>")]),
        ("json", [("user", "Result of find:\nfound 1\n\nResult of find:\nfound 2")]),
        ("react", [("user", "Observation: found 1\n\nObservation: found 2")]),
    ],
)  # fmt: skip
def test_results_are_in_order_and_each_call_is_rewarded(name, replies):
    env = Shop(default_tools=[find], tool_format=name)
    env.reset(seed=0)
    observation, reward, _, _, info = env.step(turn(env, *ONE_AND_TWO))
    said = [(message["role"], message["content"]) for message in info["messages"][3:]]
    assert said == replies
    assert observation == "\n\n".join(content for _, content in replies)
    assert info["tool_result"] == "found 1\n\nfound 2"
    assert info["tool_results"] == ["found 1", "found 2"]
    assert info["reward_terms"] == {"found": 2.0, "format": 0.0}
    assert reward == 2.0
    assert info["metrics"] == {"num_turns": 1, "num_tool_calls": 2, "num_invalid_actions": 0}
    assert [call["arguments"] for call in info["action"]["calls"]] == env.seen
    assert env.seen == [{"thing": "1"}, {"thing": "2"}]
    env = Shop(default_tools=[find], tool_format=name, parallel_calls=False)
    env.reset(seed=0)
    *_, info = env.step(turn(env, *ONE_AND_TWO))
    assert info["action"]["error"] == "multiple_actions"
    assert (env.seen, env.num_tool_calls, env.num_invalid_actions) == ([], 0, 1)
    *_, info = env.step(turn(env, ONE_AND_TWO[0]))
    assert info["tool_result"] == "found 1"
    assert "tool_results" not in info


def test_mistakes_and_failing_tools_keep_their_place():
    env = Shop(default_tools=[find, fail, leave])
    env.reset(seed=0)
    calls = [("seek", {}), ("fail", {}), *ONE_AND_TWO, ("leave", {}), ("find", {})]
    *_, info = env.step(turn(env, *calls))
    errors = [call.get("error") for call in info["action"]["calls"]]
    assert errors == ["unknown_tool", "tool_error", None, None, "tool_error", "bad_arguments"]
    assert info["action"]["error"] == "unknown_tool"
    results = info["messages"][3:]
    names = [message["name"] for message in results]
    assert names == ["call 1", "fail", "find", "find", "leave", "call 6"]
    assert "There is no tool 'seek'" in results[0]["content"]
    assert "failed (SystemExit)" in results[4]["content"]
    assert info["reward_terms"] == {"found": 2.0, "format": -0.5}
    assert (env.num_tool_calls, env.num_invalid_actions) == (4, 1)
    *_, info = env.step(turn(env, ("seek", {}), ("look", {})))
    assert (info["action"]["kind"], env.num_invalid_actions) == ("invalid", 2)
    assert info["tool_result"] is None


@pytest.mark.parametrize("family", ["SyntheticMultiHop", "SyntheticArithmetic"])
def test_calls_of_one_turn_have_the_reward_of_single_calls(family):
    env = gym.make(f"AgentR1/{family}-v0")
    for seed in range(3):
        returns = []
        for is_joined in (False, True):
            env.reset(seed=seed)
            *calls, answer = env.unwrapped.reference_actions()
            actions = ["\n".join(calls)] if is_joined else calls
            infos = [env.step(action)[4] for action in (*actions, answer)]
            terms = [term for info in infos for term in info["reward_terms"].items()]
            earned = sum(value for name, value in terms if name != "format")
            returns.append((earned, infos[-1]["metrics"] | {"num_turns": 0}))
        assert returns[0][0] == pytest.approx(returns[1][0])
        assert returns[0][1] == returns[1][1]


def test_calls_run_concurrently_and_those_of_stateful_tools_in_order():
    together, written = threading.Barrier(3, timeout=10), []

    @tool
    def meet(number: int) -> str:
        """Wait for the others."""
        together.wait()
        time.sleep(0.02 * (3 - number))  # the last is ready first
        return str(number)

    @tool(stateful=True)
    def write(number: int) -> str:
        """Write."""
        time.sleep(0.02 * (3 - number))
        written.append(number)
        return str(number)

    env = Shop(default_tools=[meet, write])
    env.reset(seed=0)
    for name in ("meet", "write"):
        *_, info = env.step(turn(env, *[(name, {"number": i}) for i in range(3)]))
        assert info["tool_results"] == ["0", "1", "2"]
    assert written == [0, 1, 2]


def test_a_call_after_the_end_is_not_run_and_the_value_of_a_reward_term_is_checked():
    class Last(Shop):
        def is_finished(self):
            return len(self.seen) == 1

    env = Last(default_tools=[Tool(find.function, timeout=None)])
    env.reset(seed=0)
    _, reward, terminated, _, info = env.step(turn(env, *ONE_AND_TWO))
    assert terminated
    assert reward == 1.0
    assert info["action"]["calls"][1]["error"] == "not_carried_out"
    assert (env.num_tool_calls, env.seen) == (1, [{"thing": "1"}])
    for value in (None, "much", float("nan")):
        env = Shop(rewards={"mine": (lambda *_, value=value: value, 1.0)})
        env.reset(seed=0)
        with pytest.raises((TypeError, ValueError)):
            env.step("hm")
