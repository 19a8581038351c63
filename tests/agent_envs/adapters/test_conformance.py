"""Our environments in every library's own loop equal those of ``gym.make``.

Those that are not installed are skipped; ``make test-adapters`` installs them.
"""

import contextlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError
from agent_envs.wrappers import render_messages
from tests.agent_envs.adapters.drivers import DRIVERS, ChatServer, reference

ID = "AgentR1/SyntheticMultiHop-v0"
MEASURED = ("tools", "seeds", "contexts")
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "libraries.md"

pytestmark = pytest.mark.filterwarnings("default")  # of other libraries


@pytest.fixture(params=DRIVERS, ids=lambda driver: driver.library)
def driver(request, tmp_path, monkeypatch):
    if find_spec(request.param.module) is None:
        pytest.skip(f"{request.param.library} is not installed; make test-adapters installs it")
    (tmp_path / "agent_r1.py").write_text(verifiers_module(), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = request.param()
    made.logs = str(tmp_path / "logs")
    return made


def verifiers_module():
    """Return the module in the documentation."""
    return re.search(r"```python\n(# agent_r1\.py\n.*?)```", PAGE.read_text(), re.DOTALL)[1]


def oracle(env):
    return env.unwrapped.reference_actions()


def wrong(env):
    return [env.unwrapped.reference_actions()[0], env.unwrapped.write_answer("nobody at all")]


def malformed(env):
    return [
        '<tool_call>{"name": "search", "arguments": {"query": 3',
        '<tool_call>{"name": "find", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": 3}}</tool_call> <|im_end|>',
        env.unwrapped.write_answer("x"),
    ]


def too_long(env):
    return [env.unwrapped.reference_actions()[0], "I wonder .", "I wonder .", "I wonder ."]


@pytest.mark.parametrize(
    ("script", "seed"), [(oracle, 8), (wrong, 7), (malformed, 7), (too_long, 8)]
)
def test_episodes_equal_those_of_gym_make(driver, script, seed):
    actions = script_actions(driver, {}, seed, script)
    expected = reference(ID, {}, driver.reset_of(ID, {}, seed), actions)
    ends = {malformed: (True, True), too_long: (False, True)}  # the last answer is the last turn
    assert expected.end == ends.get(script, (True, False))
    same(driver.play(ID, {}, seed, actions), expected)


def script_actions(driver, kwargs, seed, script):
    env = gym.make(ID, **kwargs)
    env.reset(**driver.reset_of(ID, kwargs, seed))
    return script(env)


def same(played, expected):
    if played.observations is not None:
        first, *others = played.observations
        # In a library without messages the first observation holds the prompt, too.
        assert first in (expected.observations[0], expected.notes["opening"])
        assert others == expected.observations[1:]
    if played.states is not None:
        states = expected.states if played.notes.get("raw") else expected.notes["sent"]
        if played.notes.get("appended"):  # the library's own record of what the model wrote
            states, played.states = map(without_turns, (states, played.states))
        assert played.states == states[: len(played.states)]
        assert len(played.states) >= len(expected.rewards)
    if played.texts is not None:
        assert played.texts == [render_messages(state) for state in expected.states]
    assert played.rewards == pytest.approx(expected.rewards, abs=played.precision, rel=0)
    for terms, right in zip(played.terms, expected.terms, strict=True):
        assert terms == pytest.approx(right, abs=played.precision, rel=0)
    right = expected.episode_return
    assert played.episode_return == pytest.approx(right, abs=played.precision + 1e-12, rel=0)
    if played.end is not None:
        # Some know one end only: the task's own, as it must not be bootstrapped.
        ends = [expected.end, (True, False)] if all(expected.end) else [expected.end]
        assert played.end in ends


def without_turns(states):
    return [[m for m in state if m["role"] != "assistant"] for state in states]


def test_the_table_of_the_documentation_is_measured(driver):
    assert row_of(driver.library) == measured(driver)


def test_rewards_before_a_limit_of_the_library_count(driver):
    stop = {"verifiers": limit_of_verifiers, "inspect_ai": limit_of_inspect_ai}.get(driver.library)
    if stop is None:
        pytest.skip("its driver is a loop of the tests, without limits")
    actions = script_actions(driver, {}, 7, oracle)
    expected = reference(ID, {}, driver.reset_of(ID, {}, 7), actions[:1])
    assert expected.episode_return > 0
    assert stop(driver, actions) == (expected.episode_return, True)


def limit_of_verifiers(driver, actions):
    with ChatServer(lambda place, body: actions[place]) as server:
        (episode,) = driver.run(ID, {}, 7, server, 1, max_turns=1)
    (trace,) = episode.traces
    assert episode.ok
    return trace.reward, trace.is_truncated


def limit_of_inspect_ai(driver, actions):
    turns = iter(actions)
    (sample,) = driver.run(ID, {}, 7, lambda *_: next(turns), 1, turn_limit=1).samples
    return sample.scores["earned"].value["return"], sample.limit.type == "turn"


def row_of(library):
    header, _, *rows = re.search(r"\| library \|.*?\n\n", PAGE.read_text(), re.DOTALL)[0].split(
        "\n"
    )
    names = [name.strip() for name in header.strip("|").split("|")]
    for row in rows:
        cells = dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=False))
        if re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cells.get("library", "")) == library:
            return {name: cells[name] for name in MEASURED}
    raise AssertionError(f"{library} has no row")


def measured(driver):
    actions = script_actions(driver, {}, 7, oracle)
    shown = tools(driver, driver.play(ID, {}, 7, actions))
    return {"tools": shown, "seeds": seeds(driver, actions), "contexts": contexts(driver)}


def tools(driver, played):
    """Return how the tools reach a model: as schemas, in the prompt, or not at all."""
    kwargs = {"tool_format": "openai"}
    schemas = gym.make(ID).unwrapped.tools["search"].schema
    with_schemas = None
    with refused_by_name("tool_format"):
        with_schemas = driver.play(ID, kwargs, 7, script_actions(driver, kwargs, 7, oracle))
    if with_schemas is not None and with_schemas.tools:
        assert with_schemas.tools == [schemas]
        return "schemas"
    shown = json.dumps([played.observations, played.states, played.texts])
    return "prompt" if "Search the passages for a query." in shown else "no"


@contextlib.contextmanager
def refused_by_name(argument):
    try:
        yield
    except ConfigurationError as error:
        if argument not in str(error):
            raise


def seeds(driver, actions):
    first, again, other = (driver.play(ID, {}, seed, actions) for seed in (7, 7, 9))
    assert begin(first) == begin(again)
    return "yes" if begin(first) != begin(other) else "no"


def begin(played):
    return [one and one[0] for one in (played.observations, played.states, played.texts)]


def contexts(driver):
    """Return whether a state may leave messages out."""
    kwargs = {"context": {"name": "window", "turns": 1}}
    actions = script_actions(driver, kwargs, 7, too_long)
    expected = reference(ID, kwargs, driver.reset_of(ID, kwargs, 7), actions)
    assert len(expected.states[-1]) < len(reference(ID, {}, {"seed": 7}, actions).states[-1])
    played = None
    with refused_by_name("context"):
        played = driver.play(ID, kwargs, 7, actions)
    if played is None:
        return "refused"
    same(played, expected)
    return "yes" if played.states or played.texts else "no"
