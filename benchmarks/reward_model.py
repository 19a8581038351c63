"""True against modelled reward: ``python -m benchmarks.reward_model``.

Policies are trained on true success. A reward model is trained on episodes of the embedded policy
and of checkpoints of the first run; then policies are trained on the reward model alone, or on it
less one standard deviation of its members.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from transformers.hf_argparser import HfArg

from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.grid import Grid, Result, Spec, read_json
from benchmarks.learning_run import MULTI_HOP, check_distinct
from benchmarks.papers_table import run_facts, write_page
from benchmarks.pareto import train

PROGRAM: Final = "python -m benchmarks.reward_model"
TERMS: Final = {
    "true": "exact_match", "model": "judged:solved", "cautious": "judged:cautious"
}  # fmt: skip
"""Reward term of each kind of run."""
JUDGED: Final = """from agent_trainers.experimental.reward_model import RewardModel
solved = RewardModel({0!r})
cautious = RewardModel({0!r}, caution=1.0)
"""
ENV: Final = {"hops": [1, 2, 3]}
MODEL: Final = "reward_model"


@dataclass
class RewardModelArguments:
    """Options of the command."""

    seeds: list[int] = HfArg(default_factory=lambda: [1, 2, 3], help="Seeds of the policies.")
    steps: int = HfArg(default=80, help="Optimiser steps per policy.")
    num_tasks: int = HfArg(default=400, help="Held-out tasks.")
    num_episodes: int = HfArg(default=1500, help="Episodes per policy for the reward model.")
    jobs: int = HfArg(default=1, help="Policies trained at the same time, on one core each.")
    work: str = HfArg(default="runs/reward_model", help="Folder of the runs.")
    output: str = HfArg(default="benchmarks/results", help="Folder of the page.")

    def __post_init__(self) -> None:
        """Check the seeds."""
        check_distinct("seeds", self.seeds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, RewardModelArguments, program=PROGRAM,
        description="Train policies on a reward model alone, and compare with the true reward.",
    )  # fmt: skip
    kept = {name: getattr(options, name) for name in ("steps", "num_tasks", "num_episodes")}
    with Grid(options.work, kept) as grid:
        work = grid.work.resolve()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(work), os.environ.get("PYTHONPATH", "")])
        (work / "judged.py").write_text(JUDGED.format(str(work / MODEL)), encoding="utf-8")
        results: dict[str, Result] = {}
        # The reward model, and what it judges, depend on the run of the first seed.
        for kind in TERMS:
            judge = [] if kind == "true" else [options.seeds[0]]
            cells = {f"{kind}-{seed}": [kind, seed, *judge] for seed in options.seeds}
            results |= grid.run(cells, lambda k, s: _train(grid, k, s, options), jobs=options.jobs)
            model = grid.run({MODEL: options.seeds[0]}, lambda *_: _fit(grid, options))[MODEL]
    facts = run_facts(PROGRAM, arguments, options, [model, *results.values()])
    rows = [
        [key, *(f"{true:.2f}, {seen:.2f}" for true, seen in quarters(result["curve"])),
         f"{result['success']:.3f}"]
        for key, result in results.items()
    ]  # fmt: skip
    head = ["run", *(f"quarter {k}: true, modelled" for k in range(1, 5)), "held-out success"]
    text = (
        f"# True against modelled reward\n\n`{facts['command']}`, {facts['date']}\n\n"
        f"Reward model on {model['num_trajectories']} trajectories of held-out tasks: AUC "
        f"{model['auc']:.3f}, within tasks {model['auc_within_tasks']:.3f}, expected calibration "
        f"error {model['calibration_error']:.3f}.\n\n{markdown_table(head, rows)}\n"
    )
    print(text)  # noqa: T201
    data = {"results": results, "reward_model": model, **facts}
    write_page(options.output, "reward_model", data, text)
    draw(Path(options.output) / "reward_model.png", results)


def _train(grid: Grid, key: str, spec: Spec, options: RewardModelArguments) -> Result:
    kind, seed, *_ = spec
    kwargs = {**ENV, "rewards": {TERMS[kind]: 1.0}}
    kept = ["--save_steps", "20", "--save_total_limit", "9"]
    entries, seconds = train(grid, key, options, seed, kwargs, *kept)
    return {
        "curve": [(e["step"], e["success"], e["reward"]) for e in entries if "success" in e],
        "success": [e["eval_success"] for e in entries if "eval_success" in e][-1],
        "seconds": seconds,
    }


def _fit(grid: Grid, options: RewardModelArguments) -> Result:
    """Train the reward model on episodes of a policy before, in and after its training."""
    folder, first = grid.work / MODEL, grid.work / f"true-{options.seeds[0]}"
    files, seconds = [], 0.0
    for number, model in enumerate(["", "checkpoint-20", "checkpoint-40", "."]):
        files.append(str(folder / f"episodes_{number}.jsonl.gz"))
        seconds += grid.command([
            "agent-r1-eval", *(["--model", str(first / model)] if model else []),
            "--env", MULTI_HOP, "--env_kwargs", json.dumps(ENV), "--max_completion_length", "24",
            "--num_tasks", str(options.num_episodes), "--seed", str(number),
            "--trajectories", files[-1],
        ], folder)  # fmt: skip
    command = ["python", "-m", "agent_trainers.experimental.reward_model", "train", *files]
    seconds += grid.command([*command, "--epochs", "1", "--output_dir", str(folder)], folder)
    return {**read_json(folder / "reward_model.json", {})["held_out"], "seconds": seconds}


def quarters(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return means of true and modelled reward over each quarter of a run."""
    parts = np.array_split(np.array(curve)[:, 1:], 4)
    return [(float(true), float(modelled)) for true, modelled in (p.mean(axis=0) for p in parts)]


def draw(path: Path, results: Mapping[str, Result]) -> None:
    """Draw true and modelled reward of each run on the model alone, by optimiser step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.8), dpi=120, layout="constrained")
    runs = {key: result for key, result in results.items() if not key.startswith("true")}
    panels = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
    for axes, (key, result) in zip(panels, runs.items(), strict=True):
        steps, true, modelled = zip(*result["curve"], strict=True)
        axes.plot(steps, modelled, color="#d97706", label="modelled reward")
        axes.plot(steps, true, color="#2563eb", label="true success")
        axes.set(title=key, xlabel="optimiser step", ylim=(0, 1.05))
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
