"""What training costs, side by side with TRL's own loop and with the ideal.

::

    python -m benchmarks.performance.training --output results.json
    python -m benchmarks.performance.training --device cuda --parts merged_vs_rows
    python -m benchmarks.performance.training --parts language_model

Both sides of a comparison run in the same process and in turns; a ratio is taken per pair, and the
median of the ratios is what counts. Each part's module says what exactly is compared.
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
from benchmarks.performance.language_model import measure_language_model
from benchmarks.performance.merged_rows import measure_merging
from benchmarks.performance.models import quieten
from benchmarks.performance.peak_memory import measure_memory
from benchmarks.performance.rollout_time import measure_rollouts
from benchmarks.performance.settings import DEVICE_DEFAULTS, Settings
from benchmarks.performance.step_time import measure_step_time

PARTS: Final[Mapping[str, Callable[[Settings], dict[str, Any]]]] = {
    "step_time_vs_trl": lambda settings: {"step_time_vs_trl": measure_step_time(settings)},
    "merged_vs_rows": lambda settings: {"merged_vs_rows": measure_merging(settings)},
    "rollouts": measure_rollouts,
    "memory_vs_budget": lambda settings: {"memory_vs_budget": measure_memory(settings)},
    "language_model": measure_language_model,
}
"""What can be measured; ``rollouts`` gives ``rollout_vs_trl`` and ``rollout_vs_ideal``,
``language_model`` the same two of a real model against TRL's step and against bare phases."""
DEFAULT_PARTS: Final = tuple(part for part in PARTS if part != "language_model")
"""What needs no model from elsewhere."""


def measure(settings: Settings, parts: Sequence[str] = DEFAULT_PARTS) -> dict[str, Any]:
    """Measure some parts.

    Returns:
        A result per comparison, each with ``median``, ``min``, ``max`` and ``values`` of the
        ratio, ``target``, and both sides' own numbers; ``merged_vs_rows`` and
        ``memory_vs_budget`` by number of steps.
    """
    results: dict[str, Any] = {"machine": _machine(settings)}
    for part in tqdm(parts, desc="parts"):
        results |= PARTS[part](settings)
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON."""
    options = _parse(arguments)
    quieten()
    settings = dataclasses.replace(DEVICE_DEFAULTS[options.device], language_model=options.model)
    if options.rounds is not None:
        settings = dataclasses.replace(settings, rounds=options.rounds)
    results = measure(settings, options.parts)
    sys.stdout.write("\n".join(describe(results)) + "\n")
    if options.output:
        write_json(options.output, results)


def describe(results: Mapping[str, Any]) -> list[str]:
    """Return a line per comparison, for people."""
    lines = []
    for name, result in results.items():
        if name == "machine":
            continue
        by_steps = {"": result} if "median" in result else result
        for steps, one in by_steps.items():
            lines.append(
                f"{name + (f'[{steps}]' if steps else ''):22} {one['median']:7.3f}   "
                f"({one['min']:.3f} to {one['max']:.3f}; target {one['target']:.3g}: "
                f"{'reached' if one['is_reached'] else 'missed'})"
            )
            if speed := one.get("merged"):
                share = speed["model_flops_utilisation"]
                lines.append(
                    f"{'':22} {speed['tokens_per_second']:,.0f} tokens per second, "
                    f"{speed['model_flops_per_second'] / 1e12:.3g} model TFLOP/s"
                    + ("" if share is None else f", {share:.1%} of the device's peak")
                )
    return lines


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the numbers as JSON")
    parser.add_argument(
        "--device",
        choices=sorted(DEVICE_DEFAULTS),
        default="cpu",
        help="cuda measures a model of 0.5B parameters with random weights",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(DEFAULT_PARTS), metavar="PART",
        help=f"of {', '.join(PARTS)}; without it all but the last",
    )  # fmt: skip
    parser.add_argument("--model", help="folder of the language model; SmolLM2 if not given")
    parser.add_argument("--rounds", type=int, help="pairs per comparison")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device. Leave it out to use the CPU.")
    return options


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
