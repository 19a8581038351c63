"""What environments cost beside the peers', in one run.

::

    python -m venv peers && peers/bin/pip install gem-llm skyrl-gym openenv-core
    python -m benchmarks.performance.environments --peers peers/bin/python --data passages_folder

A peer that is not installed is marked as such. Writes a table, and the figures behind it beside it;
``--parts`` measures some parts anew and keeps the others of that file.
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
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
from benchmarks.performance import retrieval, step_overhead

PASSAGES: Final = "2wikimultihopqa_extra_passages.jsonl.gz"
QUESTIONS: Final = "2wikimultihopqa_dev.jsonl.gz"
TOOL_SECONDS: Final = 0.1
PARTS: Final = ("overhead", "vectors", "retrieval")


class NoWorkEnv(ToolEnv):
    """One question, and a tool that does nothing, or waits."""

    def __init__(self, seconds: float = 0.0, **shared: Any) -> None:
        """Take how long the tool waits; without a wait it needs no deadline."""

        def search(query: str) -> str:
            """Search.

            Args:
                query: What for.
            """
            time.sleep(seconds) if seconds else None
            return "nothing"

        made = tool(search) if seconds else tool(timeout=None)(search)
        super().__init__(default_tools=[made], **shared)

    def get_task(self, index: int) -> Task:
        """Return the one task there is."""
        return Task(id="0", question="Where?", answers=("here",))


def measure_overhead(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps and resets without tool work, ours and the peers'."""
    env = gym.wrappers.TimeLimit(NoWorkEnv(), 10**9)
    call = env.unwrapped.write_call("search", query="x")  # type: ignore[attr-defined]
    ours = step_overhead.time_steps(env.reset, lambda: env.step(call), options.rounds)
    missing = {"missing": "not installed: no --peers"}
    results: dict[str, Any] = {"ours": ours} | dict.fromkeys(step_overhead.PEERS, missing)
    if options.peers is not None:
        command = [options.peers, step_overhead.__file__, str(options.rounds)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
        results |= json.loads(done.stdout.splitlines()[-1])
    return results


def measure_vectors(options: argparse.Namespace) -> dict[str, Any]:
    """Time steps of many members whose tool waits 100 ms: ours, and Gymnasium's two."""
    make = functools.partial(NoWorkEnv, TOOL_SECONDS)
    kinds: dict[str, Callable[[], VectorEnv[Any, Any, Any]]] = {
        "ours (threads)": lambda: ThreadVectorEnv([make] * options.members),
        "Gymnasium, async (processes)": lambda: AsyncVectorEnv([make] * options.members),
        "Gymnasium, sync": lambda: SyncVectorEnv([make] * options.members),
    }
    call = make().write_call("search", query="x")
    return {name: _time_vector(kind(), call, options.members) for name, kind in kinds.items()}


def _time_vector(envs: VectorEnv[Any, Any, Any], call: str, members: int) -> dict[str, float]:
    envs.reset(seed=0)
    num_steps = 1 if isinstance(envs, SyncVectorEnv) and type(envs) is SyncVectorEnv else 5
    taken = []
    for _ in range(num_steps):
        started = time.perf_counter()
        envs.step([call] * members)
        taken.append(time.perf_counter() - started)
    envs.close()
    seconds = statistics.median(taken)
    return {
        "step of all members, s": seconds,
        "steps per second": members / seconds,
        "times one by one": members * TOOL_SECONDS / seconds,
    }


def measure_retrieval(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each engine at each size."""
    passages = load_passages(options.data / PASSAGES)
    rows = read_records(options.data / QUESTIONS)
    questions = [row["question"] for row in rows][:100]
    sizes = [size or len(passages) for size in options.sizes]
    return {str(size): retrieval.measure(passages, questions, size) for size in sizes}


def describe(results: Mapping[str, Any], command: str) -> str:
    """Return the figures as a page."""
    lines = ["# What environments cost", "", f"`{command}`, on {results['machine']}.", ""]
    if overhead := results.get("overhead"):
        lines += ["## A step without tool work, in microseconds", ""]
        lines += _table("environment", step_overhead.FIGURES, overhead)
    if vectors := results.get("vectors"):
        lines += [f"## {results['members']} members with a tool of 100 ms", ""]
        lines += _table("vector environment", list(next(iter(vectors.values()))), vectors)
    for size, engines in results.get("retrieval", {}).items():
        lines += [f"## Retrieval among {int(size):,} passages", ""]
        lines += _table("engine", list(engines["ours"]), engines)
    return "\n".join(lines)


def _table(
    heading: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, Any] | None]
) -> list[str]:
    lines = [f"| {heading} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for name, row in rows.items():
        figures: list[str] = ["not measured"] * len(columns)
        if row is not None and "missing" in row:
            figures = ["not installed"] * len(columns)
        elif row is not None:
            name = f"{name} {row['version']}" if "version" in row else name
            figures = ["" if row[column] is None else f"{row[column]:.3g}" for column in columns]
        lines.append(f"| {name} | {' | '.join(figures)} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.performance.environments", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", type=Path, help="the Python of a virtual environment with peers")
    parser.add_argument("--rounds", type=int, default=10, help="episodes of 1,000 turns")
    parser.add_argument("--members", type=int, default=64, help="of vector environments")
    parser.add_argument("--data", type=Path, help=f"folder with {PASSAGES} and {QUESTIONS}")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[0, 200_000, 1_000_000], help="0: the file's own"
    )
    parser.add_argument("--output", type=Path, help="table to write; figures go beside it")
    options = parser.parse_args(arguments)
    if "retrieval" in options.parts and options.data is None:
        parser.error("the part 'retrieval' needs --data; or leave it out with --parts")
    measures = {
        "overhead": measure_overhead, "vectors": measure_vectors, "retrieval": measure_retrieval
    }  # fmt: skip
    figures = options.output and options.output.with_suffix(".json")
    results: dict[str, Any] = (
        json.loads(figures.read_text()) if figures and figures.exists() else {}
    )
    results |= {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, "
        f"Gymnasium {gym.__version__}",
        "members": options.members,
    } | {part: measures[part](options) for part in options.parts}
    page = describe(results, "python -m benchmarks.performance.environments")
    sys.stdout.write(page + "\n")
    if figures:
        write_text(options.output, page)
        write_json(figures, results)


if __name__ == "__main__":
    main()
