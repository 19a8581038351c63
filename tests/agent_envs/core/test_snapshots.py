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
    """State in attributes and in the generator."""

    def __init__(self, *, limit=3, default_tools=(), **shared):
        self.counter, self.limit, self.words = Counter(), limit, []
        super().__init__(default_tools=[Tool(self.count), *default_tools], **shared)

    def count(self, word: str) -> str:
        """Count words."""
        return self.counter.count(word)

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


class Counts(Words):
    """State in an object whose method is a tool."""

    def __init__(self, **shared):
        super().__init__(**shared)
        self.offer_tools([Tool(self.counter.count)])


class Tallies(Words):
    """State in variables of a tool, which no snapshot can copy."""

    def __init__(self, **shared):
        tally, self.tallied = make_tally()
        super().__init__(default_tools=[tally], **shared)

    not_in_snapshots: ClassVar = frozenset({"tallied"})

    def begin_episode(self):
        super().begin_episode()
        self.tallied.clear()


NOTED = []


@tool(stateful=True)
def note(word: str) -> str:
    """Note a word."""
    NOTED.append(word)
    return f"{len(NOTED)} words"


class Notes(Words):
    """State of a tool in a variable of its module."""

    def __init__(self, **shared):
        super().__init__(default_tools=[note], **shared)

    def begin_episode(self):
        super().begin_episode()
        NOTED.clear()


class Locked(Words):
    """An attribute that cannot be pickled."""

    def begin_episode(self):
        super().begin_episode()
        self.inner = {"window": [Counter(value=threading.Lock())]}


class Leaves(Words):
    """Leaves attributes out of snapshots; each task has its own tools."""

    not_in_snapshots: ClassVar = frozenset({"connection", "page"})

    def __init__(self, **shared):
        self.connection = threading.Lock()
        super().__init__(**shared)

    def begin_episode(self):
        super().begin_episode()
        self.on_restore()

    def on_restore(self):
        self.page = f"page of {self.task.id} {self.task_index}"
        self.offer_tools([Tool(self.count, name=f"count_{self.task_index}")])

    def pinned_text(self):
        return f"{self.page} {super().pinned_text()}"


def run(env, words="abcab"):
    """Return the outcomes of calling every tool with each word."""
    calls = [env.write_call(name, word=word) for word in words for name in env.tools]
    return [repr(env.step(call)) for call in calls]


@pytest.mark.parametrize("kind", [Words, Counts, Tallies, Notes, Locked, Leaves])
def test_an_episode_continues_from_a_snapshot(kind):
    env = kind()
    env.reset(seed=1)
    run(env, "ab")
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    assert snapshot.is_replayed == (kind in (Counts, Tallies, Notes, Locked))
    expected = run(env)
    other = kind()
    other.restore(snapshot)
    assert run(other) == expected
    env.later = "not in the snapshot"
    connection = getattr(env, "connection", None)
    env.reset(options={"task": env.task_index + 1})
    env.restore(snapshot)
    assert getattr(env, "connection", None) is connection
    assert run(env) == expected
    assert snapshot.is_replayed or not hasattr(env, "later")


def test_a_replayed_episode_has_its_turn_limit():
    rewards = {"last": (lambda env, event: float(event.is_last), 1.0)}
    env = gym.wrappers.TimeLimit(Counts(rewards=rewards), 2)
    env.reset(seed=0)
    assert [env.step("hm")[1] for _ in range(2)] == [0.0, 1.0]
    env.unwrapped.restore(env.unwrapped.snapshot())


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
