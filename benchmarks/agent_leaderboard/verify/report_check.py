"""The pages of a run, made again from its results and compared."""

from collections.abc import Collection, Iterator
from pathlib import Path

from agent_leaderboard.records.reading import read_text
from agent_leaderboard.report.summary import Board, read_run, summarise
from agent_leaderboard.report.tables import PAGE, PAGE_WITH_TEXT, REPORTS, make_reports


def read_board(run: Path) -> Board:
    """Summarise a run that is being checked.

    Raises:
        DataError: If it cannot be read.
    """
    return summarise(read_run(run))


def check_reports(
    run: Path, board: Board, data: Path | None, not_replayed: Collection[str]
) -> Iterator[str]:
    """Yield the pages that are not what the results give; a page that is not there is none.

    The web page shows episodes of generated tasks, so it cannot be compared where those cannot be
    played.
    """
    shown = {e.slug for e in board.run.manifest.environments if e.is_text_public}
    names = [name for name in (*REPORTS, PAGE_WITH_TEXT) if (run / name).exists()]
    if shown & set(not_replayed):
        names = [name for name in names if name != PAGE]
    if not_replayed and PAGE_WITH_TEXT in names:
        names.remove(PAGE_WITH_TEXT)
        yield f"{PAGE_WITH_TEXT}: cannot be made again here, and is not to be passed on; delete it"
    for name, text in make_reports(board, names, data).items():
        if read_text(run / name) != text:
            yield f"{name}: is not what the results give; `agent-r1-bench report` writes it anew"
