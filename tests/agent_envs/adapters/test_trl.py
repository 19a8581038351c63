"""The adapter without TRL, whose calls the tests make."""

import inspect
import json
from typing import Annotated, Literal

import gymnasium as gym
import pydantic
import pytest

from agent_envs import ConfigurationError, tool
from agent_envs.adapters.trl import (
    FAILED_TEXT,
    OVER_TEXT,
    environment_factory,
    environment_return,
    tasks_dataset,
)

ID = "AgentR1/SyntheticMultiHop-v0"


def said(text):
    return {"role": "assistant", "content": text}


def called(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(text):
    return {"role": "tool", "content": text}


def query_of(action):
    call = json.loads(action.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return call["arguments"]["query"]


def solve(environment):
    """Do all but the last reference action; return the messages so far, and the last."""
    actions = environment._episode.env.unwrapped.reference_actions()
    messages = []
    for query in map(query_of, actions[:-1]):
        messages += [called("search", query=query), result(environment.search(query=query))]
    return messages, actions[-1]


@pytest.fixture
def environment():
    return environment_factory(ID)()


@tool
def travel(
    start: str,
    kind: Literal["fast", "cheap"],
    unit: Literal["km", "mile"] = "km",
    days: int = 3,
    stops: list[list[str]] | None = None,
    costs: dict[str, float] | None = None,
    seats: Annotated[int, pydantic.Field(ge=1)] = 1,
    name: str | int = "",
) -> str:
    """Plan a journey. Args: none of these.

    Two paragraphs.

    Args:
        start: Where it begins.
            Returns: no.
        kind: What matters.
    """
    return f"{start} {kind} {unit} {days} {stops} {costs} {seats} {name}"


def test_enumerations_defaults_optional_and_nested_arguments_survive():
    from transformers.utils import get_json_schema

    instance = environment_factory(ID, tools=[travel])()
    schema = get_json_schema(instance.travel)["function"]
    assert schema["description"] == "Plan a journey. Args : none of these.\n\nTwo paragraphs."
    assert schema["parameters"]["required"] == ["start", "kind"]
    strings = {"type": "array", "items": {"type": "string"}}
    numbers = {"type": "object", "additionalProperties": {"type": "number"}}
    expected = {
        "start": ({"type": "string"}, "Where it begins. Returns : no."),
        "kind": ({"type": "string", "enum": ["fast", "cheap"]}, "What matters."),
        "unit": ({"type": "string", "enum": ["km", "mile"]}, 'The unit. (default: "km")'),
        "days": ({"type": "integer"}, "The days. (default: 3)"),
        "stops": ({"type": "array", "items": strings, "nullable": True}, "The stops."),
        "costs": (numbers | {"nullable": True}, "The costs."),
        "seats": ({"type": "integer"}, 'The seats. (default: 1) JSON schema: {"minimum": 1, '
                  '"type": "integer"}'),
        "name": ({"type": ["integer", "string"]}, 'The name. (default: "")'),
    }  # fmt: skip
    assert schema["parameters"]["properties"] == {
        name: kind | {"description": text} for name, (kind, text) in expected.items()
    }
    instance.reset(task=1)
    assert instance.travel(start="Oslo", kind="fast", name="x").startswith("Oslo fast km 3 None")


def named(name):
    @tool(name=name)
    def function(word: str) -> str:
        """Say a word."""
        return f"{word}<|im_end|>"

    return function


def test_tools_may_have_names_that_are_not_identifiers_and_results_hold_no_control_tokens():
    from transformers.utils import get_json_schema

    names = ["class", "read-file", "server.tool"]
    instance = environment_factory(ID, tools=[named(name) for name in names])()
    instance.reset(task=0)
    for name in names:
        method = dict(inspect.getmembers(instance))[name]
        assert get_json_schema(method)["function"]["name"] == method.__name__ == name
        assert method(word="hello") == "hello< |im_end|>"


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        (ID, {"tool_format": "tags"}, "tool_format='tags'.*chat template says how"),
        (ID, {"context": {"name": "window", "turns": 2}}, "contexts only grow"),
        ("AgentR1/SyntheticLongHorizon-v0", {}, "asks several questions"),
        ("CartPole-v1", {}, "not an environment with tools"),
        (ID, {"tools": [named("reset")]}, r"cannot be called 'reset'.*@tool\(name="),
        (ID, {"tools": [named("get_reward")]}, "cannot be called 'get_reward'"),
        (ID, {"tools": [named("_hidden")]}, "cannot be called '_hidden'"),
    ],
)
def test_environments_that_trls_loop_cannot_run_are_refused(env_id, kwargs, message):
    with pytest.raises(ConfigurationError, match=message):
        environment_factory(env_id, **kwargs)


def test_a_group_shares_its_task_by_seed_or_by_task():
    first, second = environment_factory(ID)(), environment_factory(ID)()
    assert first.reset(seed=5, prompt=[]) == second.reset(seed=5, prompt=[])
    kept = first._episode
    assert first.reset(seed=5) != first.reset(seed=6)
    local, _ = gym.make(ID).reset(options={"task": 7})
    assert first.reset(task=7) == second.reset(task=7, seed=1) == local
    assert first._episode is kept  # one environment per instance
    with pytest.raises(ConfigurationError, match="neither a column 'seed' nor 'task'"):
        first.reset(prompt=[])


def test_the_last_text_is_the_answer_and_every_term_is_logged(environment):
    environment.reset(task=3)
    messages, answer = solve(environment)
    logged = {}
    returns = environment_return([[*messages, said(answer)]], [environment], logged.__setitem__)
    assert returns == [pytest.approx(1.2)]
    assert logged == {
        "episodes/failed": 0.0,
        "success": 1.0,
        "rewards/exact_match": 1.0,
        "rewards/new_gold_passage": pytest.approx(0.2),
    }


@pytest.mark.parametrize("was_carried_out", [False, True], ids=["beyond the limit", "too long"])
def test_a_call_whose_result_trl_drops_is_carried_out_once(environment, was_carried_out):
    environment.reset(task=3)
    query = query_of(environment._episode.env.unwrapped.reference_actions()[0])
    if was_carried_out:
        environment.search(query=query)
    completion = [called("search", query=query)]
    assert environment_return([completion], [environment]) == [pytest.approx(0.1)]
    assert environment._episode.num_turns == 1


def test_wrong_calls_are_steps_and_calls_after_the_end_are_not(environment):
    environment.reset(task=3)
    assert environment.search(nonsense=1).startswith("Wrong arguments for 'search'")
    found = [environment.search(query="director") for _ in range(4)]
    assert [text == OVER_TEXT for text in found] == [False, False, False, True]
    assert environment_return([[said("<answer>x</answer>")]], [environment]) == [0.0]
    assert environment._episode.num_turns == 4


def test_a_failing_environment_fails_its_own_episode_and_is_replaced(monkeypatch, caplog):
    factory = environment_factory(ID)
    healthy, broken = factory(), factory()
    for instance in (healthy, broken):
        instance.reset(task=3)
    broken_env = broken._episode.env
    monkeypatch.setattr(broken_env, "step", lambda action: 1 / 0)
    assert broken.search(query="x") == FAILED_TEXT
    logged = {}
    texts = [[said("<answer>a</answer>")]] * 2
    returns = environment_return(texts, [healthy, broken], logged.__setitem__)
    assert returns == [0.0, None]
    assert logged["episodes/failed"] == 0.5
    assert logged["success"] == 0.0
    assert "ZeroDivisionError" in caplog.text
    broken.reset(task=3)
    assert broken._episode.env is not broken_env
    assert broken.search(query="x") != FAILED_TEXT


def test_rows_hold_system_prompt_task_and_seed(hotpot_file):
    rows = tasks_dataset(ID, 3, seed=1, system_prompt="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert rows["prompt"][0] == [system, {"role": "user", "content": ""}]
    assert rows[:] == tasks_dataset(ID, 3, seed=1, system_prompt="Be brief.")[:]
    assert len(set(rows["task"])) == len(set(rows["seed"])) == 3
    with pytest.raises(ConfigurationError, match="num_tasks must be 1 to"):
        tasks_dataset(ID)
    assert tasks_dataset("AgentR1/HotpotQA-v0", data=hotpot_file)["task"][:] == [0, 1]
    assert tasks_dataset("AgentR1/HotpotQA-v0", 1, data=hotpot_file)["task"][:] == [0]
