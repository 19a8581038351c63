"""Measure, fit, check, extrapolate, and write the results and the page."""

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.cost_model import (
    Assumptions,
    extrapolate,
    fit,
    predict,
)
from benchmarks.scaling.measure import NUM_STEPS
from benchmarks.scaling.page import write_page

PAGE: Final = Path(__file__).parents[2] / "docs" / "scaling.md"
GPUS: Final = (1, 2, 8, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the tables are written to")
    parser.add_argument("--num_steps", type=int, default=NUM_STEPS, help="optimiser steps a case")
    parser.add_argument(
        "--from_measured",
        action="store_true",
        help="measure nothing: take the cases from the results that are there",
    )
    options = parser.parse_args(arguments)
    if options.from_measured:
        cases = json.loads(options.output.read_text(encoding="utf-8"))["cases"]
    else:
        cases = measure_in_processes(CASES, options.num_steps)
    result = analyse(cases)
    write_json(options.output, result)
    write_page(options.page, result)


def measure_in_processes(cases: Sequence[Case], num_steps: int) -> list[dict[str, Any]]:
    """Measure each case with as many processes as it has, one core each."""
    measured: dict[Case, dict[str, Any]] = {}
    for count in sorted({case.processes for case in cases}):
        chosen = [case for case in cases if case.processes == count]
        with tempfile.TemporaryDirectory() as folder:
            request, output = Path(folder) / "request.json", Path(folder) / "measured.json"
            records = [dataclasses.asdict(case) for case in chosen]
            write_json(request, {"cases": records, "num_steps": num_steps})
            launcher = [sys.executable]
            if count > 1:
                launcher += ["-m", "torch.distributed.run", "--standalone"]
                launcher += ["--nproc_per_node", str(count)]
            module = ["-m", "benchmarks.scaling.measure", str(request), str(output)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            subprocess.run([*launcher, *module], check=True, env=environment)  # noqa: S603
            results = json.loads(output.read_text(encoding="utf-8"))
        measured |= dict(zip(chosen, results, strict=True))
    return [measured[case] for case in cases]


def analyse(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit the model, check it on the cases held out, and extrapolate."""
    measured = [{name: entry[name] for name in ("case", "seconds", "num_steps")} for entry in cases]
    costs = fit([entry for entry in measured if not entry["case"]["is_held_out"]])
    for entry in measured:
        prediction = predict(Case(**entry["case"]), costs)
        entry["model"] = {term: round(value, 6) for term, value in prediction.items()}
    assumptions = Assumptions()
    return {
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine()},
        "core_share": _core_share(measured),
        "cases": measured,
        "costs": costs,
        "fit_error": _error([e for e in measured if not e["case"]["is_held_out"]]),
        "held_out_error": _error([e for e in measured if e["case"]["is_held_out"]]),
        "assumptions": dataclasses.asdict(assumptions),
        "extrapolated": [
            {
                "processes": processes,
                "seconds": {
                    term: round(value, 6)
                    for term, value in extrapolate(assumptions, processes).items()
                },
            }
            for processes in GPUS
        ],
    }


def _core_share(entries: Sequence[Mapping[str, Any]]) -> float:
    """Return how much of its core a process had: the median of those measured alone or together.

    The lower of both: two processes want all cores there may be. They also wait for each other a
    little, so their share is below 1 on a quiet machine too.
    """
    shares: dict[int, list[float]] = {}
    for entry in entries:
        seconds = entry["seconds"]
        share = seconds["cpu"]["median"] / seconds["total"]["median"]
        shares.setdefault(entry["case"]["processes"], []).append(share)
    return float(min(statistics.median(values) for values in shares.values()))


def _error(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    errors = [
        abs(entry["model"]["total"] / entry["seconds"]["total"]["median"] - 1) for entry in entries
    ]
    return {"num_cases": len(errors), "median": statistics.median(errors), "most": max(errors)}


if __name__ == "__main__":
    main()
