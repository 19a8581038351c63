"""Reward-hacking probes: one task with short, padded, shuffled, wrong, early, late or no answers.

`play_ways` runs all of them, and `find_detour` finds one with too high a return: with default
rewards, no solution returns more than the shortest one, and no failure more than a solution.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent_envs.core.tool_env import ToolEnv
from agent_envs.formats.actions import example_arguments
from agent_envs.testing.episodes import TextEnv, mistake, reference_actions, step

NUM_RANDOM_WAYS: Final = 8
MAX_TOOLS: Final = 3
UNLIMITED_TURNS: Final = 12
FLOOD: Final = " ".join(map(str, range(1_000)))
TOLERANCE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Play:
    """One probe, and its result."""

    way: str
    solved: bool
    earned: float


def play_ways(env: TextEnv, seed: int, actions: Sequence[str] = ()) -> list[Play]:
    """Run every probe on the task of `seed`, the shortest solution (`actions`) first."""
    env.reset(seed=seed)
    actions = actions or reference_actions(env)
    if not actions or not isinstance(env.unwrapped, ToolEnv):
        return []
    ways = itertools.chain([("shortest", actions)], _ways(env, actions, seed))
    plays = []
    for way, turns in ways:
        _, info = env.reset(seed=seed)
        earned = 0.0
        for action in turns:
            _, reward, terminated, truncated, info = step(env, action)
            earned += reward
            if terminated or truncated:
                break
        plays.append(Play(way, info.get("metrics", {}).get("success") == 1, earned))
    return plays


def find_detour(plays: Sequence[Play]) -> str | None:
    """Describe a probe with too high a return; None if there is none."""
    if not plays:
        return None
    shortest = plays[0]
    if not shortest.solved:
        return "the reference actions do not solve the task"
    least = min((play for play in plays if play.solved), key=lambda play: play.earned)
    for play in plays:
        other = shortest if play.solved else least
        if play.earned > other.earned + TOLERANCE * play.solved:
            verb = "solves the task and" if play.solved else "fails and"
            than = f"more than {other.way!r} with {other.earned:g}"
            return f"{play.way!r} {verb} earns {play.earned:g}, {than}"
    return None


def _ways(env: TextEnv, actions: Sequence[str], seed: int) -> Iterator[tuple[str, Sequence[str]]]:
    base: ToolEnv = env.unwrapped  # type: ignore[assignment] # checked by play_ways
    limit = base.max_turns or UNLIMITED_TURNS
    *calls, last = actions
    room = max(0, limit - len(actions))
    wrong = base.write_answer("nothing of the kind")
    pointless = {"mistakes": mistake(env), "the first call again": actions[0], "no action": "hm"}
    for tool in list(base.tools.values())[:MAX_TOOLS]:
        example = example_arguments(tool)
        pointless[f"pointless calls of {tool.name}"] = base.write_call(tool.name, **example)
        flood = dict.fromkeys(example, FLOOD)
        pointless[f"floods of {tool.name}"] = base.write_call(tool.name, **flood)
    yield "the last action at once", [last]
    yield "a wrong answer at once", [wrong]
    yield "a wrong answer at the end", [*calls, wrong]
    yield "the calls without an answer", [*calls, *calls][:limit]
    yield "every call twice", [*itertools.chain(*zip(calls, calls, strict=True)), last]
    yield "the calls backwards", [*reversed(calls), last]
    yield "all calls in one turn", ["\n".join(calls), last]
    yield "all calls in one turn, many times", ["\n".join(calls * 20)] * (limit - 1) + [last]
    for number in range(len(calls)):
        yield f"without call {number + 1}", [*calls[:number], *calls[number + 1 :], last]
    for text, ending in (("?", "marks"), (" the", "little words")):
        reworded = (_reworded(call, text * n) for call in calls for n in range(1, 4))
        yield f"calls again with {ending}", [*calls, *itertools.islice(reworded, room), last]
    for name, action in pointless.items():
        yield f"{name}, then the shortest", [*[action] * room, *actions]
        yield f"the calls, then {name}", [*calls, *[action] * room, last]
        yield f"the calls, then {name} and no answer", [*calls, *[action] * limit]
        yield f"{name} and nothing else", [action] * limit
    broken = [call[: len(call) * 3 // 4] for call in calls]
    repaired = list(itertools.chain(*zip(broken, calls, strict=True)))
    yield "every call wrong first", [*repaired[: max(0, limit - 1)], last]
    rng = np.random.default_rng(seed)
    pool = [*calls, *pointless.values(), *broken]
    for number in range(NUM_RANDOM_WAYS):
        drawn = [pool[i] for i in rng.integers(len(pool), size=int(rng.integers(limit)))]
        yield f"random way {number + 1}", [*drawn, last if number % 2 else wrong]


def _reworded(call: str, text: str) -> str:
    """Append `text` to the last text argument of a call."""
    head, mark, tail = call.rpartition('"')
    return f"{head}{text}{mark}{tail}"
