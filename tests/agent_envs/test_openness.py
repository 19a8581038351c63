# ruff: noqa: RUF012 - examples as a user would write them
"""Custom formats, contexts, retrievers, tools, data sets and rewards, as users write them."""

import json
import threading

import gymnasium as gym
import pytest

from agent_envs import (
    ConfigurationError,
    DataError,
    DatasetEnv,
    DatasetSpec,
    NewConversation,
    ParsedAction,
    Task,
    ToolEnv,
    ToolFormat,
    UnknownNameError,
    text_field,
    tool,
)
from agent_envs.retrieval import Hit, Passage

ID = "AgentR1/SyntheticMultiHop-v0"


class Line(ToolFormat):
    """``call NAME JSON`` or ``say ANSWER``, on the last line."""

    name = "line"

    def parse(self, text, tools):
        word, _, rest = text.strip().rpartition("\n")[2].partition(" ")
        if word == "say" and rest:
            return ParsedAction(kind="answer", answer=rest)
        if word != "call":
            return self.invalid("no_action", "Write a call or an answer. {examples}", tools)
        name, _, arguments = rest.partition(" ")
        try:
            return self.checked_call(name, json.loads(arguments), tools)
        except ValueError as error:
            return self.bad_json(error, tools)

    def write_call(self, name, arguments):
        return f"call {name} {json.dumps(arguments)}"

    def write_answer(self, answer):
        return f"say {answer}"

    def instructions(self, tools):
        return self.examples({tool.name: tool for tool in tools})

    def result_message(self, name, content):
        return {"role": "user", "content": f"{name}: {content}"}


def test_custom_tool_format():
    env = gym.make(ID, tool_format=Line())
    _, info = env.reset(seed=0)
    assert (info["tool_format"], info["is_native_format"]) == ("line", False)
    assert 'call search {"query": "the query"}' in info["messages"][0]["content"]
    *calls, answer = env.unwrapped.reference_actions()
    for call in calls:
        assert env.step(f"I look it up.\n{call}")[0].startswith("search: [1]")
    assert env.step(answer)[4]["metrics"]["success"] == 1.0


def task_and_last_turn(history):
    return [*history.initial, *(history.turns[-1] if history.turns else ())]


def test_custom_context():
    env = gym.make(ID, context=task_and_last_turn)
    env.reset(seed=0)
    env.step("hm")
    info = env.step("hm")[4]
    assert [message["role"] for message in info["messages"]] == [
        "system", "user", "assistant", "user",
    ]  # fmt: skip
    assert info["context"]["num_dropped"] == 2


class Shelf:
    """Finds passages whose title is a word of the query."""

    def __init__(self, *passages):
        self.passages = passages
        self.lock = threading.Lock()  # an index in use is often no plain data

    def search(self, query, top_k):
        hits = [
            Hit(passage=passage, index=number, score=1.0)
            for number, passage in enumerate(self.passages)
            if passage.title in query.split()
        ]
        return hits[:top_k]


def test_custom_retriever(data_files):
    shelf = Shelf(Passage("Oslo", "A city."), Passage("Ada Holm", "A painter."))
    env = gym.make("AgentR1/HotpotQA-v0", data=data_files["AgentR1/HotpotQA-v0"], retriever=shelf)
    env.reset(seed=0)
    assert env.step(env.unwrapped.write_call("search", query="in Oslo"))[0] == "[1] Oslo\nA city."


@tool
def shout(text: str) -> str:
    """Shout.

    Args:
        text: What to shout.
    """
    return text.upper()


def test_custom_tool():
    env = gym.make(ID, tools=[shout])
    env.reset(seed=0)
    assert env.step(env.unwrapped.write_call("shout", text="hey"))[0] == "HEY"


def read_capital(row, index):
    return Task(
        id=f"capital-{index}",
        question=f"What is the capital of {text_field(row, 'country')}?",
        answers=(text_field(row, "capital"),),
    )


class CapitalsEnv(DatasetEnv):
    """Asks for capitals; each file has its own countries."""

    dataset = DatasetSpec(read=read_capital, form="A row needs 'country' and 'capital'.")
    reward_functions = {"right": lambda env, event: float(event.action.answer in env.task.answers)}
    default_rewards = {"right": 1.0}


def test_custom_data_set(tmp_path):
    path = tmp_path / "capitals.jsonl"
    path.write_text('{"country": "Norway", "capital": "Oslo"}\n{"country": "Chile"}\n')
    with pytest.raises(DataError, match=r"capitals\.jsonl, row 2: field 'capital'"):
        CapitalsEnv(data=path)
    path.write_text('{"country": "Norway", "capital": "Oslo"}\n')
    env = CapitalsEnv(data=path)
    assert env.num_tasks == 1
    assert env.reset(seed=0)[0] == "What is the capital of Norway?"
    assert env.step("<answer>Oslo</answer>")[1:3] == (1.0, True)
    with pytest.raises(DataError, match=r"pass data= with a file\. A row needs 'country'"):
        CapitalsEnv()


def is_short(env, event):
    """Return 1 for a first action of at most 40 characters."""
    return float(env.num_turns == 1 and len(event.action.answer or "") <= 40)


def test_custom_reward_term():
    env = gym.make(ID, rewards={"exact_match": 1.0, "short": (is_short, 0.1)})
    env.reset(seed=0)
    _, reward, *_, info = env.step("<answer>Oslo</answer>")
    assert info["reward_terms"] == {"exact_match": 0.0, "short": 0.1}
    assert reward == 0.1
    assert env.unwrapped.reward_weights == {"exact_match": 1.0, "short": 0.1}


class Quiz(ToolEnv):
    """Three tries; a wrong answer is replied to in the same conversation."""

    reward_functions = {"solved": lambda env, event: float(env.is_solved)}
    default_rewards = {"solved": 1.0}
    num_tasks = 9

    def get_task(self, index):
        return Task(id=f"quiz-{index}", question=f"Guess a number below {index + 2}.",
                    answers=(str(index),))  # fmt: skip

    def begin_episode(self):
        self.is_solved = False

    def on_answer(self, answer):
        self.is_solved = answer in self.task.answers
        return None if self.is_solved or self.num_turns == 3 else f"{answer} is wrong; try again."


def test_a_dialogue_answer_reply_answer():
    env = Quiz()
    env.reset(options={"task": 4})
    observation, reward, terminated, _, info = env.step("<answer>3</answer>")
    assert (observation, reward, terminated) == ("3 is wrong; try again.", 0.0, False)
    assert [message["content"] for message in info["messages"][1:]] == [
        "Guess a number below 6.", "<answer>3</answer>", "3 is wrong; try again.",
    ]  # fmt: skip
    assert env.step("<answer>4</answer>")[1:3] == (1.0, True)


class Series(Quiz):
    """Asks the same thing again, as if nothing had been said."""

    def on_answer(self, answer):
        return NewConversation("And now?") if self.num_turns == 1 else None


def test_an_answer_can_start_a_new_conversation():
    env = Series(system_prompt="")
    env.reset(seed=0)
    observation, _, terminated, _, info = env.step("<answer>3</answer>")
    assert (observation, terminated) == ("And now?", False)
    assert info["messages"] == [{"role": "user", "content": "And now?"}]
    assert env.step("<answer>3</answer>")[2]


def test_on_answer_must_not_return_a_verdict():
    class Judging(Quiz):
        def on_answer(self, answer):
            return answer in self.task.answers

    env = Judging()
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"Judging\.on_answer returned False; it must return None"):
        env.step("<answer>3</answer>")


def test_an_empty_subclass_says_what_is_missing():
    class Empty(ToolEnv):
        """Nothing."""

    with pytest.raises(NotImplementedError, match=r"Empty must define get_task\(self, index\)"):
        Empty().reset(seed=0)
    with pytest.raises(NotImplementedError, match=r"Empty does not define reference_actions"):
        Empty().reference_actions()


def test_zero_tasks_are_an_error():
    class NoTasks(Quiz):
        num_tasks = 0

    with pytest.raises(ConfigurationError, match=r"NoTasks\.num_tasks is 0"):
        NoTasks().reset(seed=0)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"rewards": {"short": (is_short, "much")}}, ConfigurationError, "a function and a number"),
        ({"rewards": {"short": is_short}}, UnknownNameError, "Unknown reward term 'short'"),
        ({"tool_format": Line}, UnknownNameError, "Unknown tool format"),
        ({"context": 3}, ConfigurationError, "a name, a name with options, or a callable"),
        ({"id": "AgentR1/HotpotQA-v0", "retriever": 3}, ConfigurationError, "with search"),
    ],
)
def test_a_wrong_object_is_named(kwargs, error, message):
    with pytest.raises(error, match=message):
        gym.make(**{"id": ID, **kwargs})


def test_a_spec_of_names_is_json():
    kwargs = {"tool_format": "tags", "context": {"name": "window", "turns": 2},
              "rewards": {"exact_match": 1.0}}  # fmt: skip
    spec = gym.make(ID, **kwargs).spec
    assert json.loads(spec.to_json())["kwargs"] == kwargs
    assert gym.make(gym.envs.registration.EnvSpec.from_json(spec.to_json())).spec == spec


def test_a_spec_of_objects_makes_the_same_environment():
    env = gym.make(ID, tool_format=Line(), context=task_and_last_turn, tools=[shout])
    again = gym.make(env.spec)
    assert again.reset(seed=7)[1] == env.reset(seed=7)[1]
