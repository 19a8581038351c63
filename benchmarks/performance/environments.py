"""Costs of steps and vector environments: ``python -m benchmarks.performance.environments``."""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from agent_envs import Task, ToolEnv, tool
from agent_envs.core.vector_env import ThreadVectorEnv
from agent_envs.data.files import write_json
from benchmarks.performance.interleaved import seconds_of

TOOL_SECONDS: Final = 0.1
TURNS: Final = (1, 10, 100, 1000)


class NoWorkEnv(ToolEnv):
    """One question, and a tool that does nothing or waits."""

    def __init__(self, seconds: float = 0.0, **shared: Any) -> None:
        """Set the time the tool waits; without a wait it has no deadline."""

        def search(query: str) -> str:
            """Search.

            Args:
                query: Search query.
            """
            if seconds:
                time.sleep(seconds)
            return "nothing"

        made = tool(search) if seconds else tool(timeout=None)(search)
        super().__init__(default_tools=[made], **shared)

    def get_task(self, index: int) -> Task:
        """Return the only task."""
        return Task(id="0", question="Where?", answers=("here",))


def measure_overhead(rounds: int) -> dict[str, float]:
    """Return medians over episodes, in microseconds: of the reset and of some turns."""
    env = TimeLimit(NoWorkEnv(), 10**9)
    call = env.unwrapped.write_call("search", query="x")  # type: ignore[attr-defined]
    episodes = []
    for _ in range(rounds + 1):  # the first episode warms up
        times = [seconds_of(env.reset), *(seconds_of(env.step, call) for _ in range(max(TURNS)))]
        episodes.append(times)
    names = {"reset": 0} | {f"turn {turn}": turn for turn in TURNS}
    return {
        name: statistics.median(times[turn] for times in episodes[1:]) * 1e6
        for name, turn in names.items()
    }


def measure_vectors(members: int) -> dict[str, dict[str, float]]:
    """Time steps of many members whose tool waits 100 ms, in our and Gymnasium's classes."""
    make = functools.partial(NoWorkEnv, TOOL_SECONDS)
    processes = functools.partial(AsyncVectorEnv, shared_memory=False)
    kinds: dict[str, tuple[Callable[..., VectorEnv[Any, Any, Any]], int]] = {
        "ours (threads)": (ThreadVectorEnv, 5),
        "Gymnasium, async (processes)": (processes, 5),
        "Gymnasium, sync": (SyncVectorEnv, 1),
    }
    actions = [make().write_call("search", query="x")] * members
    results = {}
    for name, (kind, num_steps) in kinds.items():
        envs = kind([make] * members)
        envs.reset(seed=0)
        seconds = statistics.median(seconds_of(envs.step, actions) for _ in range(num_steps))
        envs.close()
        results[name] = {"seconds": seconds, "times sequential": members * TOOL_SECONDS / seconds}
    return results


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="episodes of 1,000 turns")
    parser.add_argument("--members", type=int, default=64, help="of vector environments")
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args()
    results = {
        "microseconds of a step without tool work": measure_overhead(options.rounds),
        f"step of {options.members} members with a tool of 100 ms": measure_vectors(
            options.members
        ),
    }
    sys.stdout.write(json.dumps(results, indent=2) + "\n")
    if options.output:
        write_json(options.output, results)


if __name__ == "__main__":
    main()
