"""How an environment is played to check it, with right, wrong and hostile actions."""

import contextlib
import itertools
import json
import math
import pickle
import sys
from collections.abc import Iterator
from typing import Any, Final

import gymnasium as gym
import numpy as np

import agent_envs  # noqa: F401 - registers our ids, also in a process that begins here
from agent_envs.core.actions import example_arguments
from agent_envs.core.tool_env import ToolEnv

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
"""None is an answer in any format but ``openai``, where every text without a call is one."""
MAX_FEEDBACK_CHARS: Final = 50_000
_NASTY: Final = ("", "\x00", '"', "{", "}}", "\\", "</tool_call>", "<answer>", "9" * 400, "\ud800")
NOT_MADE: Final = 3


class Problem(Exception):
    """What is wrong, in a sentence for the environment's author."""


def expect(is_right: bool, problem: str) -> None:
    """Raise `problem` unless the environment is right."""
    if not is_right:
        raise Problem(problem)


def record(env: TextEnv, seed: int) -> dict[str, str]:
    """Play one episode; return all it showed as text, by place (step 0 is the reset)."""
    observation, info = env.reset(seed=seed)
    shown: dict[str, str] = {}
    for number, outcome in enumerate([(observation, 0.0, False, False, info), *play(env, seed)]):
        names = ("observation", "reward", "terminated", "truncated")
        pieces = dict(zip(names, outcome[:4], strict=True))
        pieces |= {f"info[{key!r}]": value for key, value in outcome[4].items()}
        shown |= {f"step {number}: {name}": repr(value) for name, value in pieces.items()}
    return shown


def play_in_child() -> None:
    """Play what the parent process pickled, and print what was shown; see `check_processes`."""
    try:
        make_env, seed = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
        env = make_env()
    except Exception as error:  # noqa: BLE001 - the parent says it
        sys.stderr.write(" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(NOT_MADE)
    sys.stdout.write("\n" + json.dumps(record(env, seed)))


def play(env: TextEnv, seed: int) -> Iterator[Outcome]:
    """Go on from a reset: a mistake, the reference actions, and broken ones before the last."""
    *first, last = reference_actions(env) or [mistake(env)]
    broken = itertools.islice(broken_actions(env, seed), 3)
    for action in [mistake(env), *first, *broken, last]:
        outcome = step(env, action)
        yield outcome
        if outcome[2] or outcome[3]:
            return


def step(env: TextEnv, action: str) -> Outcome:
    """Take a step, which must go through whatever the text, and check its reward."""
    place = f"step({action[:80]!r})"
    try:
        observation, reward, terminated, truncated, info = env.step(action)
    except Exception as error:
        raise Problem(f"{place} raises {type(error).__name__}: {error}") from error
    expect(isinstance(observation, str), f"{place}: the observation is no str")
    expect(math.isfinite(reward), f"{place}: the reward is {reward}")
    if not info.get("tool_result"):  # what a tool says has a limit of its own
        expect(len(observation) <= MAX_FEEDBACK_CHARS, f"{place}: {len(observation)} characters")
    total = sum(info["reward_terms"].values()) if "reward_terms" in info else reward
    expect(total == reward, f"{place}: reward_terms sum to {total}, the reward is {reward}")
    return observation, float(reward), terminated, truncated, info


def mistake(env: TextEnv) -> str:
    """Return an action that runs no tool and, in a `ToolEnv` of any format, is no answer."""
    base = env.unwrapped
    return base.write_call("no_such_tool") if isinstance(base, ToolEnv) else "hm"


def reference_actions(env: TextEnv) -> list[str]:
    """Return what solves the current task; nothing where that is not known."""
    with contextlib.suppress(NotImplementedError):
        return list(getattr(env.unwrapped, "reference_actions", list)())
    return []


def broken_actions(env: TextEnv, seed: int) -> Iterator[str]:
    """Yield right actions with a piece cut out, or with something nasty in its place."""
    rng = np.random.default_rng(seed)
    actions = [*reference_actions(env), mistake(env)]
    if isinstance(base := env.unwrapped, ToolEnv):
        calls = (base.write_call(t.name, **example_arguments(t)) for t in base.tools.values())
        actions += [*calls, base.write_answer("an answer")]
    while True:
        action = actions[rng.integers(len(actions))]
        start, stop = sorted(rng.integers(0, len(action) + 1, size=2))
        yield action[:start] + _NASTY[rng.integers(len(_NASTY))] + action[stop:]
