"""Measure the cases, and write the results and the page."""

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

from agent_envs.data.files import write_json, write_text
from agent_envs.errors import DataError
from agent_leaderboard.report.visible_text import markdown_table
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.measure import NUM_STEPS, TERMS

PAGE: Final = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN: Final = "<!-- begin measured: made by python -m benchmarks.scaling -->"
END: Final = "<!-- end measured -->"
_QUIET: Final = 0.8
"""Share of a core below which a measurement is not to be trusted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="the results, as JSON")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the table is written to")
    parser.add_argument("--num_steps", type=int, default=NUM_STEPS, help="optimiser steps a case")
    parser.add_argument(
        "--from_measured",
        action="store_true",
        help="measure nothing: make the page from the results that are there",
    )
    options = parser.parse_args(arguments)
    if not options.from_measured:
        machine = {"cpus": os.cpu_count(), "architecture": platform.machine()}
        cases = measure_in_processes(CASES, options.num_steps)
        write_json(options.output, {"machine": machine, "cases": cases})
    result = json.loads(options.output.read_text(encoding="utf-8"))
    write_page(options.page, result["cases"])


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


def write_page(page: Path, cases: Sequence[Mapping[str, Any]]) -> None:
    """Put the table of measured cases between the page's markers.

    Raises:
        DataError: If a marker is missing.
    """
    head, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, closed, tail = rest.partition(END)
    if not (found and closed):
        raise DataError(f"{page}: needs the lines {BEGIN!r} and {END!r}.")
    content = f"{measured_table(cases)}\n\n{_quietness(cases)}"
    write_text(page, f"{head}{BEGIN}\n{content}\n{END}{tail}")


def measured_table(cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per measured case: medians by term."""
    head = ["processes", "turns", "observation", "group", *TERMS, "total", "spread"]
    rows = []
    for entry in cases:
        case, seconds = entry["case"], entry["seconds"]
        total = seconds["total"]
        rows.append(
            [
                *(str(case[n]) for n in ("processes", "turns", "observation_tokens", "group_size")),
                *(f"{seconds[term]['median']:.3f}" for term in TERMS),
                f"{total['median']:.2f}",
                f"{total['least']:.2f} to {total['most']:.2f}",
            ]
        )
    return markdown_table(head, rows, len(head))


def _quietness(cases: Sequence[Mapping[str, Any]]) -> str:
    """Say how much of its core a process had: the median of those measured alone or together.

    The lower of both: two processes want all cores there may be. They also wait for each other a
    little, so their share is below 1 on a quiet machine too.
    """
    shares: dict[int, list[float]] = {}
    for entry in cases:
        seconds = entry["seconds"]
        share = seconds["cpu"]["median"] / seconds["total"]["median"]
        shares.setdefault(entry["case"]["processes"], []).append(share)
    share = min(map(statistics.median, shares.values()))
    text = f"While it was measured, a process had {share:.0%} of its core"
    if share >= _QUIET:
        return f"{text}."
    return f"{text}: **the machine was busy with other things: times are too long and uneven**."


if __name__ == "__main__":
    main()
