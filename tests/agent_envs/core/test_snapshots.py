"""What a snapshot, a copy and a pickle keep; that every id goes on from them is the kit's."""

import copy
import pickle
import threading
from dataclasses import dataclass, field, replace
from typing import ClassVar

import gymnasium as gym
import pytest
from gymnasium.utils import EzPickle
from gymnasium.wrappers import TimeLimit

from agent_envs import SnapshotError, Task, Tool, ToolEnv, tool
from agent_envs.testing import run_checks

ID = "AgentR1/SyntheticTable-v0"


@dataclass
class Counter:
    """A thing with a state, whose method is a tool."""

    value: int = 0
    seen: set[str] = field(default_factory=set)

    def count(self, word: str) -> str:
        """Count words.

        Args:
            word: A word.
        """
        self.value += 1
        self.seen.add(word)
        return f"{self.value} {sorted(self.seen)}"


def make_tally():
    """Return a tool whose state is what its function closes over."""
    counts, last = {}, None

    def remember(word):
        nonlocal last
        last = word
        counts[word] = counts.get(word, 0) + 1

    @tool
    def tally(word: str) -> str:
        """Count a word.

        Args:
            word: A word.
        """
        before = last
        remember(word)
        return f"{counts[word]} after {before}"

    return tally


@tool
def shout(word: str) -> str:
    """Shout.

    Args:
        word: A word.
    """
    return word.upper()


class Words(ToolEnv):
    """State in every place where one can be: attributes, an object, closures, the generator."""

    def __init__(self, *, limit=3, **shared):
        self.counter, self.limit, self.words = Counter(), limit, []
        super().__init__(default_tools=[Tool(self.counter.count), make_tally()], **shared)

    def get_task(self, index):
        return Task(id=str(index), question="Count.", answers=())

    def begin_episode(self):
        self.words.clear()

    def on_result(self, action, result):
        self.words.append(f"{action.arguments['word']}{self.np_random.integers(100)}")

    def pinned_text(self):
        return " ".join(self.words)


def play(env, words="abcab"):
    """Return all that is shown when both tools are called with each word."""
    names = [name for name in env.unwrapped.tools if name != "shout"]
    calls = [env.unwrapped.write_call(name, word=word) for word in words for name in names]
    return [repr(env.step(call)) for call in calls]


@pytest.fixture
def env():
    env = Words()
    env.reset(seed=1)
    play(env, "ab")
    return env


def test_attributes_objects_closures_and_the_generator_are_all_restored(env):
    snapshot = pickle.loads(pickle.dumps(env.snapshot()))
    counter, expected = env.counter, play(env)
    env.counter.later = env.later = "not there before"
    env.restore(snapshot)
    assert not hasattr(env, "later")
    assert not hasattr(counter, "later")
    assert play(env) == expected
    assert env.counter is counter  # the tool is its method
    elsewhere = Words()
    elsewhere.restore(snapshot)
    assert play(elsewhere) == expected


@pytest.mark.parametrize("again", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_a_copy_goes_on_alike_and_shares_no_state(env, again):
    first, second = again(env), again(env)
    expected = play(env)
    assert play(first) == expected
    play(second, "zz")
    assert play(first, "q") == play(env, "q")


def test_tools_that_a_caller_passes_are_copied_with_their_state():
    counter = Counter()
    env = gym.make(ID, tools=[Tool(counter.count), make_tally(), shout])
    env.reset(seed=0)

    def call(env, name, word="a"):
        return env.step(env.unwrapped.write_call(name, word=word))[0]

    assert [call(env, "count"), call(env, "tally")] == ["1 ['a']", "1 after None"]
    copied, snapshot = copy.deepcopy(env), env.unwrapped.snapshot()
    assert [call(copied, "count"), call(copied, "tally")] == ["2 ['a']", "2 after a"]
    assert counter.value == 1
    assert [call(env, "count"), call(env, "tally")] == ["2 ['a']", "2 after a"]
    env.unwrapped.restore(snapshot)
    assert counter.value == 1
    assert [call(env, "count"), call(env, "tally")] == ["2 ['a']", "2 after a"]


def test_a_tool_of_a_module_is_pickled_and_one_of_a_function_is_an_argument_that_cannot_be():
    env = pickle.loads(pickle.dumps(gym.make(ID, tools=[shout])))
    assert env.unwrapped.tools["shout"] is shout
    with pytest.raises(SnapshotError, match=r"its argument 'tools'\[0\].*make_tally"):
        pickle.dumps(gym.make(ID, tools=[make_tally()]))
    with pytest.raises(SnapshotError, match="its argument 'context'"):
        pickle.dumps(Words(context=lambda history: history.messages))


def test_a_snapshot_of_other_arguments_or_of_another_environment_is_refused(env):
    snapshot = env.snapshot()
    with pytest.raises(SnapshotError, match="limit is not given there and 4 here"):
        Words(limit=4).restore(snapshot)
    with pytest.raises(SnapshotError, match=r"class is .*Words there and .*SyntheticTableEnv here"):
        gym.make(ID).unwrapped.restore(snapshot)
    with pytest.raises(SnapshotError, match="takes a Snapshot, not bytes"):
        env.restore(b"x")
    Words(render_mode="ansi").restore(snapshot)


class Locked(Words):
    """Holds what no pickle can."""

    def begin_episode(self):
        self.inner = {"window": [Counter(value=threading.Lock())]}


def test_what_cannot_be_saved_is_named():
    env = Locked()
    env.reset(seed=0)
    sentence = (
        r"Locked cannot be saved, because 'inner'\['window'\]\[0\]\.value of the environment, a "
        r"lock, cannot be: cannot pickle '_thread.lock' object\. What no step changes, name in "
        r"not_in_snapshots"
    )
    for save in (ToolEnv.snapshot, pickle.dumps, copy.deepcopy):
        with pytest.raises(SnapshotError, match=sentence):
            save(env)
    found = {result.name: result for result in run_checks(Locked)}
    assert found["snapshots"].status == "failed"
    assert "'window'" in found["snapshots"].detail


def test_a_tool_whose_variables_cannot_be_saved_is_named():
    lock = threading.Lock()

    @tool
    def guarded(word: str) -> str:
        """Say it alone.

        Args:
            word: A word.
        """
        with lock:
            return word

    env = Words(tools=[guarded])
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match="'lock' of the variables of the tool 'guarded'"):
        env.snapshot()


class Leaves(Words):
    """Names what it does not want to be saved, and brings it back."""

    not_in_snapshots: ClassVar = frozenset({"connection"})

    def __init__(self, **shared):
        self.connection = threading.Lock()
        super().__init__(tools=[self.make_tool(self.connection)], **shared)

    def make_tool(self, connection):
        def ask(word: str) -> str:
            """Ask.

            Args:
                word: A word.
            """
            with connection:
                return word

        return Tool(ask)

    def begin_episode(self):
        super().begin_episode()
        self.on_restore()

    def on_restore(self):
        self.page = f"page of {self.task.id} {self.task_index}"


def test_what_a_class_leaves_out_stays_and_what_an_episode_makes_is_brought_back():
    env = Leaves()
    env.reset(seed=0)
    snapshot, connection = env.snapshot(), env.connection
    env.reset(seed=5)
    env.restore(snapshot)
    assert env.connection is connection
    assert env.page == f"page of {env.task.id} {env.task_index}"
    assert copy.deepcopy(env).connection is not connection


class WithEzPickle(Words, EzPickle):
    """EzPickle says that the arguments are all of the state."""

    def __init__(self, **shared):
        EzPickle.__init__(self, **shared)
        super().__init__(**shared)


def test_ez_pickle_does_not_hide_the_state():
    env = WithEzPickle()
    env.reset(seed=0)
    play(env, "a")
    assert play(pickle.loads(pickle.dumps(env))) == play(env)


def test_the_data_and_the_index_are_shared_by_copies(data_files):
    env = gym.make("AgentR1/HotpotQA-v0", data=data_files["AgentR1/HotpotQA-v0"]).unwrapped
    env.reset(seed=0)
    copied = copy.deepcopy(env)
    assert copied._tasks is env._tasks
    assert copied.retriever is env.retriever


def test_a_python_session_is_refused_by_name_once_it_has_run(data_files):
    env = gym.make(
        "AgentR1/GSM8K-v0", data=data_files["AgentR1/GSM8K-v0"], tools=["python"], sandbox="limits"
    )
    env.reset(seed=0)
    env.unwrapped.restore(env.unwrapped.snapshot())
    env.step(env.unwrapped.write_call("python", code="x = 1"))
    with pytest.raises(SnapshotError, match="the tool 'python' cannot be: a Python session"):
        env.unwrapped.snapshot()
    env.close()


def test_the_turn_limit_counts_on_from_a_snapshot_in_an_environment_never_reset():
    env = gym.make(ID, max_episode_steps=4)
    env.reset(seed=0)
    env.step("one")
    snapshot = env.unwrapped.snapshot()
    fresh = gym.make(ID, max_episode_steps=4)
    fresh.unwrapped.restore(snapshot)
    for other in (env, fresh):
        outcomes = [other.step("hm")[2:4] for _ in range(3)]
        assert outcomes == [(False, False), (False, False), (False, True)]
    env.unwrapped.restore(snapshot)  # whatever the wrapper has counted
    assert [env.step("hm")[3] for _ in range(3)] == [False, False, True]


def test_a_long_episode_is_saved_in_less_than_a_step_of_a_model():
    env = Words()
    env.reset(seed=0)
    sizes = []
    for turn in range(300):
        env.step(f"turn {turn}")
        sizes.append(len(env.snapshot().state))
    assert sizes[-1] < 300 * 1_000
    wrapped = TimeLimit(env, 3)
    wrapped.reset()
    assert len(env.snapshot().state) < 2 * sizes[0]


def test_summaries_that_were_written_are_part_of_a_snapshot():
    asked = []

    def summarise(messages):
        asked.append(len(messages))
        return f"summary {len(asked)}"

    def make():
        context = ["full", {"name": "summary", "turns": 1, "summarise": summarise}]
        env = gym.make(ID, context=context, max_episode_steps=9)
        env.reset(seed=0)
        return env

    env, other = make(), make()
    for _ in range(3):
        env.step("hm")
    other.unwrapped.restore(env.unwrapped.snapshot())
    num_asked = len(asked)
    other.step("hm")
    assert len(asked) == num_asked + 1  # about the new turn only


class OwnTools(Words):
    """Each task has tools of its own, with a state."""

    def begin_episode(self):
        super().begin_episode()
        self.on_restore()

    def on_restore(self):
        tally = make_tally()
        tally.name = f"tally_{self.task_index}"
        self._tools = {tally.name: tally}


def test_the_tools_of_an_episode_are_restored_with_their_state():
    env = OwnTools()
    env.reset(options={"task": 1})
    play(env, "ab")
    snapshot, expected = env.snapshot(), play(env)
    for index in (1, 2):
        env.reset(options={"task": index})
        env.restore(snapshot)
        assert play(env) == expected
    assert play(pickle.loads(pickle.dumps(env))) == play(env)


@pytest.mark.parametrize("state", [pickle.dumps(5), pickle.dumps(()), b"", b"no pickle"])
def test_a_damaged_snapshot_is_refused(state):
    env = gym.make(ID)
    env.reset(seed=0)
    damaged = replace(env.unwrapped.snapshot(), state=state)
    with pytest.raises(SnapshotError, match="cannot be read here"):
        env.unwrapped.restore(damaged)
