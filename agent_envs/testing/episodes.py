"""Episodes of the conformance kit: right, broken and hostile actions."""

import contextlib
import itertools
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

import agent_envs  # noqa: F401 - registers our ids, also in a child process
from agent_envs.core.tool_env import ToolEnv
from agent_envs.formats.actions import example_arguments

TextEnv = gym.Env[str, str]
Outcome = tuple[str, float, bool, bool, dict[str, Any]]

HOSTILE_ACTIONS: Final = (
    "", " ", "\x00\ud800é漢字🙂", "<tool_call>", "<tool_call>{", "<tool_call>" * 5_000,
    "x" * 100_000,
    '<tool_call>{"name": "search", "arguments": ' + "[" * 10_000,
    '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"unknown": 1}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": ""}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>',
    '<tool_call>{"name": 1e999999, "arguments": NaN}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": ' + "9" * 5000 + "}}</tool_call>",
    "<answer></answer>", "<answer>a</answer><answer>b</answer>", "<think><answer>a</answer>",
)  # fmt: skip
"""None is an answer, except in the format ``openai``, where any text without a call is one."""
MAX_FEEDBACK_CHARS: Final = 50_000
_NASTY: Final = ("", "\x00", '"', "{", "}}", "\\", "</tool_call>", "<answer>", "9" * 400, "\ud800")
NOT_MADE: Final = 3


class NotOffered(Exception):
    """The environment does not offer what a check needs."""


class Problem(Exception):
    """A defect, in a sentence for the author of the environment."""


def expect(is_right: bool, problem: str) -> None:
    """Raise `problem` unless the environment is right."""
    if not is_right:
        raise Problem(problem)


@dataclass(frozen=True, slots=True)
class Subject:
    """The checked environment; `spec` if ``gym.make`` made it."""

    make_env: Callable[[], TextEnv]
    spec: EnvSpec | None
    episodes: int
    seed: int
    folder: str = field(default_factory=os.getcwd)
    """The current folder before any episode."""

    def make(self, **changes: Any) -> TextEnv:
        """Make the environment, with changed arguments if it has a spec."""
        return self.spec.make(**changes) if self.spec and changes else self.make_env()


def record(env: TextEnv, seed: int) -> dict[str, str]:
    """Run an episode of the planned actions and one that calls every tool.

    Returns their results as text, by place (step 0 is the reset).
    """
    shown: dict[str, str] = {}
    for name in ("", "calls of all tools, "):
        observation, info = env.reset(seed=seed)
        actions = tool_calls(env) * 2 if name else _planned_actions(env, seed)
        outcomes = [(observation, 0.0, False, False, info), *_take(env, actions)]
        shown |= {f"{name}{place}": text for place, text in _show(outcomes).items()}
    return shown


def compare(first: Mapping[str, str], second: Mapping[str, str], where: str) -> None:
    """Expect equal results of `record`."""
    for place in [*first, *second]:
        expect(first.get(place) == second.get(place), f"{place} differs {where}")


def halt(env: TextEnv, seed: int, share: float) -> tuple[list[str], Any]:
    """Run a share of an episode; return the actions of the rest, and a snapshot."""
    env.reset(seed=seed)
    actions = _planned_actions(env, seed)
    num_taken = len(list(_take(env, actions)))
    start = int(share * num_taken)
    env.reset(seed=seed)
    for action in actions[:start]:
        step(env, action)
    return actions[start:num_taken], env.unwrapped.snapshot()  # type: ignore[attr-defined]


def finish(env: TextEnv, actions: Sequence[str]) -> dict[str, str]:
    """Take the other actions, then reset; return the results as `record` does."""
    outcomes = [step(env, action) for action in actions]
    observation, info = env.reset()  # draws a task
    return _show([*outcomes, (observation, 0.0, False, False, info)])


def run_in_child() -> None:
    """Run the episodes that the parent process pickled, and print them; see `check_processes`."""
    try:
        make_env, seeds, saved = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
        env = make_env()
    except Exception as error:  # noqa: BLE001 - the parent reports it
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(NOT_MADE)
    shown, rest = [record(env, seed) for seed in seeds], {}
    if saved is not None:
        actions, snapshot = saved
        env.unwrapped.restore(snapshot)
        rest = finish(env, actions)
    sys.stdout.write("\n" + json.dumps([shown, rest]))


def run_episode(env: TextEnv, seed: int) -> Iterator[Outcome]:
    """After a reset, take a mistake, the reference actions, and broken ones before the last."""
    return _take(env, _planned_actions(env, seed))


def _take(env: TextEnv, actions: Sequence[str]) -> Iterator[Outcome]:
    for action in actions:
        outcome = step(env, action)
        yield outcome
        if outcome[2] or outcome[3]:
            return


def _planned_actions(env: TextEnv, seed: int) -> list[str]:
    *first, last = reference_actions(env) or [mistake(env)]
    broken = itertools.islice(broken_actions(env, seed), 3)
    return [mistake(env), *first, *broken, last]


def tool_calls(env: TextEnv) -> list[str]:
    """Return a call of every tool, with example arguments."""
    base = env.unwrapped
    if not isinstance(base, ToolEnv):
        return []
    return [base.write_call(t.name, **example_arguments(t)) for t in base.tools.values()]


def _show(outcomes: Sequence[Outcome]) -> dict[str, str]:
    names = ("observation", "reward", "terminated", "truncated")
    shown: dict[str, str] = {}
    for number, outcome in enumerate(outcomes):
        values = dict(zip(names, outcome[:4], strict=True))
        values |= {f"info[{key!r}]": value for key, value in outcome[4].items()}
        shown |= {f"step {number}: {name}": repr(value) for name, value in values.items()}
    return shown


def step(env: TextEnv, action: str) -> Outcome:
    """Take a step, which must not raise, and check its result."""
    place = f"step({action[:80]!r})"
    try:
        observation, reward, terminated, truncated, info = env.step(action)
    except Exception as error:
        raise Problem(f"{place} raises {type(error).__name__}: {error}") from error
    expect(isinstance(observation, str), f"{place}: the observation is no str")
    expect(math.isfinite(reward), f"{place}: the reward is {reward}")
    if not info.get("tool_result"):  # results have their own limit
        expect(len(observation) <= MAX_FEEDBACK_CHARS, f"{place}: {len(observation)} characters")
    total = sum(info["reward_terms"].values()) if "reward_terms" in info else reward
    expect(total == reward, f"{place}: reward_terms sum to {total}, the reward is {reward}")
    return observation, float(reward), terminated, truncated, info


def mistake(env: TextEnv) -> str:
    """Return an action that runs no tool and is no answer in a `ToolEnv`."""
    base = env.unwrapped
    return base.write_call("no_such_tool") if isinstance(base, ToolEnv) else "hm"


def reference_actions(env: TextEnv) -> list[str]:
    """Return actions that solve the current task; none if they are unknown."""
    with contextlib.suppress(NotImplementedError):
        return list(getattr(env.unwrapped, "reference_actions", list)())
    return []


def broken_actions(env: TextEnv, seed: int) -> Iterator[str]:
    """Yield right actions with a random piece removed or replaced by hostile text."""
    rng = np.random.default_rng(seed)
    actions = [*reference_actions(env), mistake(env), *tool_calls(env)]
    if isinstance(base := env.unwrapped, ToolEnv):
        actions.append(base.write_answer("an answer"))
    while True:
        action = actions[rng.integers(len(actions))]
        start, stop = sorted(rng.integers(0, len(action) + 1, size=2))
        yield action[:start] + _NASTY[rng.integers(len(_NASTY))] + action[stop:]
