"""Training compared with TRL's own trainer: ``python -m benchmarks.performance.training``.

Both sides of a comparison run interleaved in one process; the result is the median of the ratios of
pairs.
"""

import dataclasses
import functools
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

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from benchmarks.performance.gradients import measure_memory, measure_merging
from benchmarks.performance.models import DEVICE_DEFAULTS, Settings, quieten
from benchmarks.performance.steps import measure_rollouts, measure_steps

PARTS: Final[Mapping[str, Callable[[Settings], dict[str, Any]]]] = {
    "step_vs_trl": measure_steps,
    "slow_tools_vs_trl": functools.partial(measure_steps, has_slow_tools=True),
    "slow_tools_vs_ideal": measure_rollouts,
    "merged_vs_rows": measure_merging,
    "memory_vs_budget": measure_memory,
}
"""The comparisons; ``merged_vs_rows`` has a result by number of steps."""


def describe(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a comparison."""
    if "median" not in result:
        return [line for steps, one in result.items() for line in describe(f"{name}[{steps}]", one)]
    lines = [f"{name:22} {result['median']:7.3f}   ({result['min']:.3f} to {result['max']:.3f})"]
    if speed := result.get("merged"):
        share = speed["model_flops_utilisation"]
        lines.append(
            f"{'':22} {speed['tokens_per_second']:,.0f} tokens per second, "
            f"{speed['model_flops_per_second'] / 1e12:.3g} model TFLOP/s"
            + ("" if share is None else f", {share:.1%} of the device's peak")
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    parser.add_argument(
        "--device", choices=sorted(DEVICE_DEFAULTS), default="cpu",
        help="cuda measures a model of 0.5B parameters with random weights",
    )  # fmt: skip
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive_int, help="pairs per comparison")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device. Leave it out to use the CPU.")
    quieten()
    settings = DEVICE_DEFAULTS[options.device]
    if options.rounds is not None:
        settings = dataclasses.replace(settings, rounds=options.rounds)
    results: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, trl)},
            "settings": dataclasses.asdict(settings),
        }
    }
    for part in tqdm(options.parts, desc="parts"):
        results[part] = PARTS[part](settings)
        sys.stdout.write("\n".join(describe(part, results[part])) + "\n")
    if options.output:
        write_json(options.output, results)


if __name__ == "__main__":
    main()
