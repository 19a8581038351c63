"""Training compared with TRL's own trainer: ``python -m benchmarks.performance.training``.

Both sides of a comparison run interleaved in one process; the result is the median of the ratios of
pairs.
"""

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import transformers
import trl
from tqdm.auto import tqdm

from agent_envs.data.files import write_json
from benchmarks.performance.gradients import measure_memory, measure_merging
from benchmarks.performance.models import DEVICE_DEFAULTS, Settings, quieten
from benchmarks.performance.rollouts import measure_rollouts
from benchmarks.performance.step_time import measure_step_time

PARTS: Final[Mapping[str, Callable[[Settings], dict[str, Any]]]] = {
    "step_time_vs_trl": lambda settings: {"step_time_vs_trl": measure_step_time(settings)},
    "merged_vs_rows": lambda settings: {"merged_vs_rows": measure_merging(settings)},
    "rollouts": measure_rollouts,
    "memory_vs_budget": lambda settings: {"memory_vs_budget": measure_memory(settings)},
}
"""Results by part; ``rollouts`` gives ``rollout_vs_trl`` and ``rollout_vs_ideal``."""


def measure(settings: Settings, parts: Sequence[str] = tuple(PARTS)) -> dict[str, Any]:
    """Return a result per comparison; see `benchmarks.performance.interleaved.compare`.

    ``merged_vs_rows`` and ``memory_vs_budget`` have one by number of steps.
    """
    results: dict[str, Any] = {"machine": _machine(settings)}
    for part in tqdm(parts, desc="parts"):
        results |= PARTS[part](settings)
    return results


def describe(results: Mapping[str, Any]) -> list[str]:
    """Return a line per comparison."""
    lines = []
    for name, result in results.items():
        if name == "machine":
            continue
        for steps, one in ({"": result} if "median" in result else result).items():
            lines.append(
                f"{name + (f'[{steps}]' if steps else ''):22} {one['median']:7.3f}   "
                f"({one['min']:.3f} to {one['max']:.3f})"
            )
            if speed := one.get("merged"):
                share = speed["model_flops_utilisation"]
                lines.append(
                    f"{'':22} {speed['tokens_per_second']:,.0f} tokens per second, "
                    f"{speed['model_flops_per_second'] / 1e12:.3g} model TFLOP/s"
                    + ("" if share is None else f", {share:.1%} of the device's peak")
                )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument(
        "--device", choices=sorted(DEVICE_DEFAULTS), default="cpu",
        help="cuda measures a model of 0.5B parameters with random weights",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="pairs per comparison")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device. Leave it out to use the CPU.")
    quieten()
    settings = DEVICE_DEFAULTS[options.device]
    if options.rounds is not None:
        settings = dataclasses.replace(settings, rounds=options.rounds)
    results = measure(settings, options.parts)
    sys.stdout.write("\n".join(describe(results)) + "\n")
    if options.output:
        write_json(options.output, results)


def _machine(settings: Settings) -> dict[str, Any]:
    is_cuda = settings.device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_cuda else platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{module.__name__: module.__version__ for module in (torch, transformers, trl)},
        "settings": dataclasses.asdict(settings),
    }


if __name__ == "__main__":
    main()
