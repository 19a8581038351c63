"""A state that is handed out: a list like any other, whose changes stay in it."""

import copy
import json
import pickle

import pytest

from agent_envs import Task, ToolEnv
from agent_envs.core.messages import StateMessages

SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

READERS = {
    "index": lambda messages: messages[0],
    "last": lambda messages: messages[-2],
    "slice": lambda messages: messages[:1][0],
    "loop": lambda messages: next(iter(messages)),
    "reversed": lambda messages: list(reversed(messages))[1],
    "unpacking": lambda messages: [*messages][-2],
    "list": lambda messages: list(messages)[-2],
    "tuple": lambda messages: tuple(messages)[::2][0],
    "sorted": lambda messages: sorted(messages, key=str)[1],
    "sum": lambda messages: messages.__add__([{"role": "user", "content": "c"}])[0],
    "pop": lambda messages: messages.pop(0),
    "copy": lambda messages: messages.copy()[0],
    "shallow copy": lambda messages: copy.copy(messages)[0],
    "deep copy": lambda messages: copy.deepcopy(messages)[0],
    "pickle": lambda messages: pickle.loads(pickle.dumps(messages))[0],
}


@pytest.mark.parametrize("read", READERS)
def test_a_message_however_it_is_read_is_nobody_elses(read):
    messages = StateMessages(SAID)
    message = READERS[read](messages)
    assert message == SAID[0]
    message["content"] = "changed"
    assert SAID[0]["content"] == "a"


def test_it_is_written_and_compared_as_a_list():
    messages = StateMessages(SAID)
    assert messages == SAID
    assert json.dumps(messages) == json.dumps(SAID)
    assert repr(messages) == repr(SAID)
    assert type(copy.copy(messages)) is type(pickle.loads(pickle.dumps(messages))) is list
    messages[0]["content"] = "changed"
    assert messages[0]["content"] == "changed"
    assert len(messages) == 2


class Waits(ToolEnv):
    """Goes on for ever."""

    def get_task(self, index):
        return Task(id="wait", question="Wait.", answers=())


def test_a_step_copies_no_message_that_nobody_reads():
    env = Waits()
    env.reset(seed=0)
    earlier, later = (env.step("hm")[4]["messages"] for _ in range(2))
    shared = zip(list.__iter__(earlier), list.__iter__(later), strict=False)
    assert all(first is second for first, second in shared)
