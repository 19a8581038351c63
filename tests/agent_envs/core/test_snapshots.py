"""State of snapshots; the conformance kit checks them for every id."""

import pickle
import threading
from dataclasses import dataclass, field
from typing import ClassVar

import gymnasium as gym
import pytest

from agent_envs import SnapshotError, Task, Tool, ToolEnv, tool

ID = "AgentR1/SyntheticTable-v0"


@dataclass
class Counter:
    """An object with state, whose method is a tool."""

    value: int = 0
    seen: set[str] = field(default_factory=set)

    def count(self, word: str) -> str:
        """Count words."""
        self.value += 1
        self.seen.add(word)
        return f"{self.value} {sorted(self.seen)}"


def make_tally():
    """Return a tool with state in a variable of its function."""
    words = []

    @tool(stateful=True)
    def tally(word: str) -> str:
        """Count a word."""
        words.append(word)
        return f"{words.count(word)} of {len(words)}"

    return tally, words


class Words(ToolEnv):
    """State in attributes, in an object whose method is a tool, and in the generator."""

    def __init__(self, *, limit=3, default_tools=(), **shared):
        self.counter, self.limit, self.words = Counter(), limit, []
        super().__init__(default_tools=[Tool(self.counter.count), *default_tools], **shared)

    def get_task(self, index):
        return Task(id=str(index), question="Count.", answers=())

    def begin_episode(self):
        self.words.clear()
        self.counter.value = 0
        self.counter.seen.clear()

    def on_result(self, action, result):
        self.words.append(f"{action.arguments['word']}{self.np_random.integers(100)}")

    def pinned_text(self):
        return " ".join(self.words)


class Tallies(Words):
    """State in variables of a tool, which no snapshot can copy."""

    def __init__(self, **shared):
        tally, self.tallied = make_tally()
        super().__init__(default_tools=[tally], **shared)

    not_in_snapshots: ClassVar = frozenset({"tallied"})

    def begin_episode(self):
        super().begin_episode()
        self.tallied.clear()


class Locked(Words):
    """An attribute that cannot be pickled."""

    def begin_episode(self):
        super().begin_episode()
        self.inner = {"window": [Counter(value=threading.Lock())]}


class Leaves(Words):
    """Leaves attributes out of snapshots; each task has its own tools, with state."""

    not_in_snapshots: ClassVar = frozenset({"connection", "page"})

    def __init__(self, **shared):
        self.connection = threading.Lock()
        super().__init__(**shared)

    def begin_episode(self):
        super().begin_episode()
        self.on_restore()

    def on_restore(self):
        self.page = f"page of {self.task.id} {self.task_index}"
        self.own = Counter()
        self.offer_tools([Tool(self.own.count, name=f"count_{self.task_index}")])

    def pinned_text(self):
        return f"{self.page} {super().pinned_text()}"


def run(env, words="abcab"):
    """Return the outcomes of calling every tool with each word."""
    calls = [env.write_call(name, word=word) for word in words for name in env.tools]
    return [repr(env.step(call)) for call in calls]


@pytest.mark.parametrize("kind", [Words, Tallies, Locked, Leaves])
def test_an_episode_continues_from_a_snapshot(kind):
    env = kind()
    env.reset(seed=1)
    run(env, "ab")
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    assert snapshot.is_replayed == (kind in (Tallies, Locked))
    counter, expected = env.counter, run(env)
    other = kind()
    other.restore(snapshot)
    assert run(other) == expected
    env.counter.later = env.later = "not in the snapshot"
    connection = getattr(env, "connection", None)
    env.reset(options={"task": env.task_index + 1})
    env.restore(snapshot)
    assert getattr(env, "connection", None) is connection
    assert run(env) == expected
    assert snapshot.is_replayed or not hasattr(env, "later")
    if kind is not Leaves:
        assert env.counter is counter  # a tool is its method
        assert snapshot.is_replayed or not hasattr(counter, "later")


def test_the_objects_of_a_callers_tools_are_restored():
    counter = Counter()
    env = gym.make(ID, tools=[Tool(counter.count)])
    env.reset(seed=0)

    def call(word="a"):
        return env.step(env.unwrapped.write_call("count", word=word))[0]

    assert call() == "1 ['a']"
    snapshot = env.unwrapped.snapshot()
    assert call() == "2 ['a']"
    env.unwrapped.restore(snapshot)
    assert counter.value == 1
    assert call() == "2 ['a']"


def test_snapshots_of_other_arguments_or_environments_are_refused():
    env = Words()
    env.reset(seed=1)
    snapshot = env.snapshot()
    with pytest.raises(SnapshotError, match=r"Words.* cannot be restored in .*\"limit\": 4"):
        Words(limit=4).restore(snapshot)
    with pytest.raises(SnapshotError, match=r"Words.* in AgentR1/SyntheticTable-v0"):
        gym.make(ID).unwrapped.restore(snapshot)
    with pytest.raises(SnapshotError, match="A snapshot of b'x'"):
        env.restore(b"x")
    Words(render_mode="ansi").restore(snapshot)
