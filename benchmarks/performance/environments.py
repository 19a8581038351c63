"""Costs of steps and vector environments: ``python -m benchmarks.performance.environments``."""

import functools
import json
import statistics
import sys
import time
from typing import Any, Final

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

from agent_envs import Task, ToolEnv, tool
from agent_envs.core.command_line import CommandLineParser
from agent_envs.core.vector_env import ThreadVectorEnv
from benchmarks.performance.interleaved import seconds_of

TOOL_SECONDS: Final = 0.1
NUM_EPISODES: Final = 10
NUM_MEMBERS: Final = 64
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


def measure_overhead() -> dict[str, float]:
    """Return medians over episodes, in microseconds: of the reset and of some turns."""
    env = TimeLimit(NoWorkEnv(), 10**9)
    call = env.unwrapped.write_call("search", query="x")  # type: ignore[attr-defined]
    episodes = []
    for _ in range(NUM_EPISODES + 1):  # the first episode warms up
        times = [seconds_of(env.reset), *(seconds_of(env.step, call) for _ in range(max(TURNS)))]
        episodes.append(times)
    names = {"reset": 0} | {f"turn {turn}": turn for turn in TURNS}
    return {
        name: statistics.median(times[turn] for times in episodes[1:]) * 1e6
        for name, turn in names.items()
    }


def measure_vectors() -> dict[str, float]:
    """Return the seconds of a step of all members whose tool waits 100 ms, ours and Gymnasium's."""
    make = functools.partial(NoWorkEnv, TOOL_SECONDS)
    actions = [make().write_call("search", query="x")] * NUM_MEMBERS
    results = {}
    for name, kind in {
        "ours (threads)": ThreadVectorEnv,
        "Gymnasium, async (processes)": functools.partial(AsyncVectorEnv, shared_memory=False),
        "Gymnasium, sync": SyncVectorEnv,
    }.items():
        envs = kind([make] * NUM_MEMBERS)
        envs.reset(seed=0)
        results[name] = statistics.median(seconds_of(envs.step, actions) for _ in range(3))
        envs.close()
    return results


def main() -> None:
    """Run the command."""
    CommandLineParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    results = {
        "microseconds of a step without tool work": measure_overhead(),
        f"seconds of a step of {NUM_MEMBERS} members with a tool of 100 ms": measure_vectors(),
    }
    sys.stdout.write(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
