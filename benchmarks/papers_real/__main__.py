"""The papers' comparison on real questions: ``python -m benchmarks.papers_real``.

A language model is warmed up on training questions of HotpotQA and 2WikiMultihopQA and trained by
every method for the same number of environment steps; then all, the untrained model and naive RAG
answer held-out questions of both, and of MuSiQue. A command that was stopped goes on; what was not
run yet is marked in the table, which is written anew after every cell.
"""

import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm

from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.checkpointing.interruption import Interrupted
from agent_trainers.cli.arguments import parse, speaker
from agent_trainers.cli.results import versions
from benchmarks.papers_real.cells import ROWS, Commands, PapersRealArguments, wanted_cells
from benchmarks.papers_real.questions import prepare_questions
from benchmarks.papers_real.report import write_report
from benchmarks.papers_real.work import RESULT_FILE, CommandFailedError, Runner
from benchmarks.work_folder import check_same_settings

_PROGRAM: Final = "python -m benchmarks.papers_real"
_say: Final = speaker("papers_real")
_MAY_CHANGE: Final = frozenset({"rows", "seeds", "work", "output"})
"""What a call may change from one to the next; all else decides what the cells are."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parse(
            arguments,
            PapersRealArguments,
            program=_PROGRAM,
            description="Compare base, naive RAG, warm start and reinforcement learning on real "
            "questions.",
        )
        run(options, shlex.join([*_PROGRAM.split(), *arguments]))
    except AgentEnvsError as error:
        sys.exit(f"papers_real: {error}")
    except Interrupted as interrupted:
        _say("Stopped. The same command goes on.")
        sys.exit(interrupted.exit_code)


def run(options: PapersRealArguments, command: str) -> None:
    """Do the cells that are missing, and write the table after each.

    Raises:
        ConfigurationError: If the folder holds another table, or commands failed; names them.
    """
    cells = wanted_cells(options.rows, options.seeds)
    runner = Runner(Commands(options))
    with runner.hold():
        check_same_settings(options, Path(options.work), may_change=_MAY_CHANGE)
        questions = prepare_questions(options, Path(options.work) / "questions")
        failed: list[str] = []
        missing = [cell for cell in cells if not runner.is_done(cell)]
        num_done = len(cells) - len(missing)
        try:
            with tqdm(total=len(cells), initial=num_done, unit="cell", smoothing=0) as bar:
                for cell in missing:
                    bar.set_description(cell.folder)
                    try:
                        runner.do(cell)
                    except CommandFailedError as error:
                        failed.append(cell.folder)
                        _say(str(error))
                        if cell.row.kind == "warm_start":
                            break  # all that follow begin with it
                    bar.update()
                    _report(options, questions, command)
        finally:
            _report(options, questions, command)
    if failed:
        raise ConfigurationError(f"failed: {', '.join(failed)}; see above, and their log.txt.")


def _report(options: PapersRealArguments, questions: dict[str, Any], command: str) -> None:
    """Write the table of all cells that are done, also those of earlier calls."""
    work = Path(options.work)
    results: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(work.glob(f"*/{RESULT_FILE}")):
        result = json.loads(path.read_text(encoding="utf-8"))
        results.setdefault(result["row"], {})[result["seed"]] = result
    seconds = sum(result["seconds"] for seeds in results.values() for result in seeds.values())
    write_report(
        Path(options.output),
        {row.name: results[row.name] for row in ROWS if row.name in results},
        {
            "command": command,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "hours": seconds / 3600,
            "model": options.model,
            "budget": options.budget,
            "passage_words": options.passage_words,
            "questions": questions,
            "versions": versions(),
        },
    )


if __name__ == "__main__":
    main()
