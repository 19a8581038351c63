"""Agents of a user's own that are asked for each turn: a function and a class."""

from pathlib import Path

from agent_envs.envs.synthetic.adversary import read_facts
from agent_trainers.policies import Generation, Usage


def first_title(state):
    if "searched" not in state.memory:
        assert state.observation == state.question
        state.memory["searched"] = True
        return state.call("search", query=state.question)
    return state.answer(state.observation.splitlines()[0].removeprefix("[1] "))


class Counting:
    """Says what each turn took, and what of its episode it remembers."""

    def __init__(self, prefix=""):
        self.prefix = prefix

    def act(self, state):
        state.memory["turns"] = state.memory.get("turns", 0) + 1
        usage = Usage(calls=1, prompt_tokens=10, completion_tokens=2)
        if state.memory["turns"] < 3:
            return Generation(text=state.call("search", query="pearl"), usage=usage)
        return Generation(text=state.answer(f"{self.prefix}{state.memory['turns']}"), usage=usage)


class Failing:
    """Fails where a file says so."""

    def __init__(self, flag):
        self.flag = flag

    def act(self, state):
        if Path(self.flag).read_text() == "away":
            raise RuntimeError("the server is away")
        return state.answer("back")


def silent(state):
    return None


def reader(state):
    return read_facts(state.messages)
