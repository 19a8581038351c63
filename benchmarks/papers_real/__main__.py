"""The papers' comparison on real questions: ``python -m benchmarks.papers_real``.

A language model is warmed up on training questions of HotpotQA and 2WikiMultihopQA and trained by
every method for the same number of environment steps. All of them, the untrained model and naive
RAG answer held-out questions of both, and of MuSiQue. The table is written after every cell.
"""

import gzip
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import atomic_path
from agent_envs.data.records import read_records
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import parse, run_command
from benchmarks.grid import CommandFailedError, Grid
from benchmarks.papers_real.cells import ROWS, CellRunner, PapersRealArguments, wanted_cells
from benchmarks.papers_real.questions import prepare_questions
from benchmarks.papers_real.report import write_report
from benchmarks.papers_table import run_facts

RESULTS_FILE: Final = "papers_real_results.jsonl.gz"
"""The results of the cells by question; those in the output folder count as computed."""
PROGRAM: Final = "python -m benchmarks.papers_real"
_MAY_CHANGE: Final = frozenset({"rows", "seeds", "jobs", "work", "output"})
"""Options that may change between calls; the cells depend on all others."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: list[str]) -> None:
    options = parse(
        arguments, PapersRealArguments, program=PROGRAM,
        description="Compare base, naive RAG, warm start and reinforcement learning.",
    )  # fmt: skip
    cells = {cell.key: cell for cell in wanted_cells(options.rows, options.seeds)}
    settings = {n: value for n, value in asdict(options).items() if n not in _MAY_CHANGE}
    with Grid(options.work, settings) as grid:
        questions = prepare_questions(options, grid.work / "questions")
        runner = CellRunner(grid, options)
        # Without the lists of files, which may lie elsewhere on another machine.
        common = {n: value for n, value in settings.items() if not isinstance(value, list)}
        common |= {"questions": questions, "protocol": runner.protocol}
        specs = {row.name: {**common, **asdict(row)} for row in ROWS}
        _take_published(grid, Path(options.output) / RESULTS_FILE, specs)
        failed = []
        for is_trained in (False, True):  # the trained ones start from the warm start
            part = [k for k, cell in cells.items() if (cell.row.kind == "trained") is is_trained]
            try:
                grid.run(
                    {key: specs[cells[key].row.name] for key in part},
                    lambda key, _: runner.compute(cells[key]),
                    jobs=options.jobs,
                    after_each=lambda: _report(grid, options, specs, arguments),
                )
            except CommandFailedError as error:
                failed.append(str(error))
        _report(grid, options, specs, arguments)
        if failed:
            raise CommandFailedError("\n".join(failed))


def _take_published(grid: Grid, path: Path, specs: Mapping[str, Any]) -> None:
    """Store the published results that the grid lacks.

    Raises:
        ConfigurationError: If they have other settings, so that a report would replace them.
    """
    stored = grid.stored()
    for record in read_records(path) if path.exists() else ():
        spec = specs[record["result"]["row"]]
        if changed := [name for name in spec if record["spec"].get(name) != spec[name]]:
            raise ConfigurationError(
                f"{path} holds results of other settings ({', '.join(changed)}). Choose another "
                "--output, or the same settings."
            )
        if stored.get(record["key"], {}).get("spec") != spec:
            grid.store(record)


def _report(
    grid: Grid, options: PapersRealArguments, specs: dict[str, Any], arguments: list[str]
) -> None:
    """Write the table of all finished cells, including those of earlier calls."""
    results: dict[str, dict[int, dict[str, Any]]] = {}
    records = [r for r in grid.stored().values() if r["spec"] == specs.get(r["result"]["row"])]
    if not records:
        return
    for record in records:
        result = record["result"]
        results.setdefault(result["row"], {})[result["seed"]] = result
    write_report(
        Path(options.output),
        {row.name: results[row.name] for row in ROWS if row.name in results},
        {
            **run_facts(PROGRAM, arguments, options, [record["result"] for record in records]),
            "model": options.model,
            "budget": options.budget,
            "passage_words": options.passage_words,
            "questions": next(iter(specs.values()))["questions"],
        },
    )
    lines = "".join(json.dumps(record) + "\n" for record in records)
    with atomic_path(Path(options.output) / RESULTS_FILE) as temporary:
        temporary.write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
