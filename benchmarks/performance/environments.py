"""Costs of environments, vector environments and retrieval.

``--parts`` measures some parts and keeps the others of the output file.
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from agent_envs import Task, ToolEnv, tool
from agent_envs.core.vector_env import ThreadVectorEnv
from agent_envs.data.files import write_json, write_text
from agent_envs.data.records import read_records
from agent_envs.retrieval import load_passages
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.performance import retrieval
from benchmarks.performance.interleaved import seconds_of

PASSAGES: Final = "2wikimultihopqa_extra_passages.jsonl.gz"
QUESTIONS: Final = "2wikimultihopqa_dev.jsonl.gz"
TOOL_SECONDS: Final = 0.1
TURNS: Final = (1, 10, 100, 1000)
_FIGURES: Final = ("reset", *(f"turn {turn}" for turn in TURNS))


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


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over episodes, in microseconds: of the reset and of some turns."""
    env = gym.wrappers.TimeLimit(NoWorkEnv(), 10**9)
    call = env.unwrapped.write_call("search", query="x")  # type: ignore[attr-defined]
    seconds: dict[str, list[float]] = {name: [] for name in _FIGURES}
    for number in range(options.rounds + 1):
        taken = {"reset": seconds_of(env.reset)}
        for turn in range(1, max(TURNS) + 1):
            taken[f"turn {turn}"] = seconds_of(env.step, call)
        for name in seconds if number else ():  # the first episode warms up
            seconds[name].append(taken[name])
    return {"ours": {name: statistics.median(values) * 1e6 for name, values in seconds.items()}}


def measure_vectors(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of many members whose tool waits 100 ms, in our and Gymnasium's classes."""
    make = functools.partial(NoWorkEnv, TOOL_SECONDS)
    kinds: dict[str, tuple[Callable[[], VectorEnv[Any, Any, Any]], int]] = {
        "ours (threads)": (lambda: ThreadVectorEnv([make] * options.members), 5),
        "Gymnasium, async (processes)": (lambda: AsyncVectorEnv([make] * options.members), 5),
        "Gymnasium, sync": (lambda: SyncVectorEnv([make] * options.members), 1),
    }
    call = make().write_call("search", query="x")
    results = {}
    for name, (kind, num_steps) in kinds.items():
        envs = kind()
        envs.reset(seed=0)
        actions = [call] * options.members
        seconds = statistics.median(seconds_of(envs.step, actions) for _ in range(num_steps))
        envs.close()
        results[name] = {
            "step of all members, s": seconds,
            "steps per second": options.members / seconds,
            "times sequential": options.members * TOOL_SECONDS / seconds,
        }
    return results


def measure_retrieval(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each engine at each size."""
    passages = load_passages(options.data / PASSAGES)
    questions = [row["question"] for row in read_records(options.data / QUESTIONS)][:100]
    sizes = [size or len(passages) for size in options.sizes]
    return {str(size): retrieval.measure(passages, questions, size) for size in sizes}


PARTS: Final[Mapping[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "overhead": measure_overhead,
    "vectors": measure_vectors,
    "retrieval": measure_retrieval,
}


def describe(results: Mapping[str, Any]) -> str:
    """Return the figures as a Markdown page."""
    command = "python -m benchmarks.performance.environments"
    parts = ["# Costs of environments", f"`{command}`, on {results['machine']}."]
    if overhead := results.get("overhead"):
        parts += ["## A step without tool work, in microseconds"]
        parts += [_table("environment", _FIGURES, overhead)]
    if vectors := results.get("vectors"):
        parts += [f"## {results['members']} members with a tool of 100 ms"]
        parts += [_table("vector environment", list(next(iter(vectors.values()))), vectors)]
    for size, engines in results.get("retrieval", {}).items():
        parts += [f"## Retrieval among {int(size):,} passages"]
        parts += [_table("engine", list(engines["ours"]), engines)]
    return "\n\n".join(parts) + "\n"


def _table(
    heading: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, Any] | None]
) -> str:
    lines = []
    for name, row in rows.items():
        cells = ["not measured"] * len(columns)
        if row is not None:
            cells = ["" if row[column] is None else f"{row[column]:.3g}" for column in columns]
        lines.append([name, *cells])
    return markdown_table([heading, *columns], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=10, help="episodes of 1,000 turns")
    parser.add_argument("--members", type=int, default=64, help="of vector environments")
    parser.add_argument("--data", type=Path, help=f"folder with {PASSAGES} and {QUESTIONS}")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[0, 200_000, 1_000_000], help="0: the file's own"
    )
    parser.add_argument("--output", type=Path, help="Markdown file; the figures go to its .json")
    options = parser.parse_args(arguments)
    if "retrieval" in options.parts and options.data is None:
        parser.error("--parts retrieval needs --data; or leave the part out.")
    figures = options.output and options.output.with_suffix(".json")
    results = json.loads(figures.read_text()) if figures and figures.exists() else {}
    results |= {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, "
        f"Gymnasium {gym.__version__}",
        "members": options.members,
    } | {part: PARTS[part](options) for part in options.parts}
    page = describe(results)
    sys.stdout.write(page)
    if figures:
        write_text(options.output, page)
        write_json(figures, results)


if __name__ == "__main__":
    main()
