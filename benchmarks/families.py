"""One trained result per family of tasks: ``python -m benchmarks.families``.

Each cell makes a tiny policy, trains it by ``grpo_step``, and evaluates it before and after on
held-out tasks. Supervised training on reference actions gives the policy its skills, and careless
demonstrations the habit of failing (see `agent_trainers.tiny_policy.make`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.cli.output_folder import RESULTS_FILE
from benchmarks.grid import Grid, Result
from benchmarks.papers_table import run_facts, write_page
from benchmarks.small_worlds import write_programs

PROGRAM: Final = "python -m benchmarks.families"
TEST: Final = {"split": "test"}
START: Final = 0.3
"""Success at most of the warm start."""
MAX_TASKS: Final = 200
"""Test tasks of the smallest family."""
_TIMES: Final = ("before", "after")
WORLDS: Final = "benchmarks.small_worlds:Benchmarks"


class Family(NamedTuple):
    """An environment, its warm start, and its training."""

    env: str
    kwargs: Mapping[str, Any]
    demonstrations: int
    """Tasks with reference actions."""
    updates: int
    """Updates of supervised training at most; 0 for the embedded policy, which is made so, too."""
    steps: int
    """Optimiser steps of reinforcement learning."""
    eval_kwargs: Mapping[str, Any] = TEST
    """Arguments that differ in evaluation."""


TAGS: Final = {"tool_format": "tags"}
FAMILIES: Final[Mapping[str, Family]] = {
    "question answering": Family("AgentR1/SyntheticMultiHop-v0", {}, 0, 0, 50),
    "mathematics": Family("AgentR1/SyntheticArithmetic-v0", {}, 2000, 800, 50),
    "code": Family("AgentR1/MBPP-v0", {**TAGS, "data": "train"}, 1000, 600, 50, {"data": "test"}),
    "tools": Family("AgentR1/SyntheticTable-v0", {"steps": 3}, 256, 400, 50),
    "household": Family(
        f"{WORLDS}/Houses-v0",
        {**TAGS, "parameters": {"numLocations": 2, "numItemsToPutAway": 1}}, 800, 400, 100,
    ),
    "web": Family(f"{WORLDS}/Shop-v0", TAGS, 256, 400, 50),
    "command line": Family(
        "AgentR1/CommandLine-v0", {**TAGS, "kinds": ["find", "rename", "edit"]}, 256, 400, 50
    ),
    "users": Family(f"{WORLDS}/Booking-v0", TAGS, 256, 400, 50),
}  # fmt: skip


@dataclass
class FamiliesArguments:
    """Options of the command."""

    families: list[str] = HfArg(default_factory=lambda: list(FAMILIES), help="Families to train.")
    num_tasks: int = HfArg(default=200, help="Held-out tasks.")
    seed: int = HfArg(default=1, help="Seed of warm starts and training.")
    jobs: int = HfArg(default=1, help="Families at the same time, on one core each.")
    work: str = HfArg(default="runs/families", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_range(self, "at least 1", "jobs")
        if not 2 <= self.num_tasks <= MAX_TASKS:
            raise ConfigurationError(f"--num_tasks must be in [2, {MAX_TASKS}].")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, FamiliesArguments, program=PROGRAM, description=(__doc__ or "").split("\n")[0]
    )
    families = {name: lookup(FAMILIES, name, kind="family") for name in options.families}
    with Grid(options.work, {n: getattr(options, n) for n in ("num_tasks", "seed")}) as grid:
        for split, count in (("train", 2000), ("test", options.num_tasks)):
            write_programs(grid.work / f"{split}.jsonl", split, count)
        cells = {name: json.loads(json.dumps(family)) for name, family in FAMILIES.items()}
        try:
            grid.run(
                {name: cells[name] for name in families},
                lambda name, _: train(grid, name, families[name], options),
                jobs=options.jobs,
            )
        finally:
            stored = grid.stored()
            results = {
                name: stored[name]["result"]
                for name, spec in cells.items()
                if stored.get(name, {}).get("spec") == spec
            }
            report(options, results, run_facts(PROGRAM, arguments, options, [*results.values()]))


def report(
    options: FamiliesArguments, results: Mapping[str, Result], facts: Mapping[str, Any]
) -> None:
    """Print the table of the trained families, and write the page."""
    table = markdown_table(
        ["family", "environment", "demonstrations", "warm start", "trained", "steps"],
        [_row(name, results.get(name)) for name in FAMILIES],
    )
    print(table)  # noqa: T201
    head = f"# One trained result per family\n\n`{facts['command']}`, {facts['date']}\n\n"
    note = f"Success in %, 95 % intervals, {options.num_tasks} held-out tasks, temperature 1."
    write_page(
        options.output, "families", {"results": results, **facts}, f"{head}{note}\n\n{table}\n"
    )
    draw(Path(options.output) / "families.png", results)


def train(grid: Grid, name: str, family: Family, options: FamiliesArguments) -> Result:
    """Make the warm start, train it, and return the evaluations before and after."""
    folder = grid.work / name.replace(" ", "_")
    kwargs, eval_kwargs = (_with_files(grid, each) for each in (family.kwargs, family.eval_kwargs))
    task = ["--env", family.env, "--env_kwargs", json.dumps(kwargs)]
    start, recipe, seconds = str(TINY_POLICY), ["--config", "default"], 0.0
    if family.updates:  # the recipe is in the folder
        start, recipe = str(folder / "start"), []
        seconds = grid.command([
            "python", "-m", "agent_trainers.tiny_policy", *task, "--success", str(START),
            "--num_steps", str(family.updates),
            "--num_tasks", str(family.demonstrations), "--seed", str(options.seed),
            "--output", start,
        ], folder)  # fmt: skip
    seconds += grid.command([
        "agent-r1-train", *recipe, "--model", start, *task,
        "--eval_env_kwargs", json.dumps(eval_kwargs),
        "--num_eval_tasks", str(options.num_tasks), "--max_steps", str(family.steps),
        "--seed", str(options.seed), "--output_dir", str(folder / "trained"),
        "--disable_tqdm", "true", "--overwrite",
    ], folder)  # fmt: skip
    found = json.loads((folder / "trained" / RESULTS_FILE).read_text(encoding="utf-8"))
    kept = {key: value for key, value in found.items() if key.startswith(("success", "return"))}
    return {**kept, "seconds": seconds}


def _with_files(grid: Grid, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the name of a split of the programs by its file."""
    files = (
        {"data": str(grid.work.resolve() / f"{kwargs['data']}.jsonl")} if "data" in kwargs else {}
    )
    return {**kwargs, **files}


def _row(name: str, result: Result | None) -> list[str]:
    family = FAMILIES[name]
    scores = ["not run"] * 2 if result is None else [_percent(result, w) for w in _TIMES]
    environment = f"`{family.env.rpartition('/')[2]}`"
    return [name, environment, str(family.demonstrations), *scores, str(family.steps)]


def _percent(result: Result, when: str) -> str:
    low, high = result[f"success_{when}_interval"]
    return f"{result[f'success_{when}']:.1%} [{low:.1%}, {high:.1%}]".replace("%", "")


def draw(path: Path, results: Mapping[str, Result]) -> None:
    """Draw success before and after, with intervals, by family."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(7, 3.5), dpi=120, layout="constrained")).add_subplot()
    for offset, when, label in ((-0.2, "before", "warm start"), (0.2, "after", "trained")):
        means = [result[f"success_{when}"] for result in results.values()]
        bounds = [result[f"success_{when}_interval"] for result in results.values()]
        errors = [
            [mean - low for mean, (low, _) in zip(means, bounds, strict=True)],
            [high - mean for mean, (_, high) in zip(means, bounds, strict=True)],
        ]
        places = [number + offset for number in range(len(means))]
        axes.bar(places, means, 0.38, yerr=errors, capsize=3, label=label)
    axes.set_xticks(range(len(results)), [*results], rotation=30, ha="right")
    axes.set(ylabel="success", ylim=(0, 1.05))
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
