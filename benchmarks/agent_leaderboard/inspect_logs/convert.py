"""Runs as logs of inspect_ai, which ``inspect view`` shows, and such logs as runs.

A log is one agent on one environment. Its samples hold, besides what the viewer shows, the result
lines as they are in the run folder: a run comes back from its logs as it was, and verifies. Logs of
evaluations that inspect_ai made itself are read too; nothing can play their episodes again, so
they are marked as not verifiable.
"""

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from agent_envs.core.lookup import require_extra
from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.inspect_logs.read_log import LogContents, read_contents
from agent_leaderboard.inspect_logs.write_log import make_log
from agent_leaderboard.records.manifest import FORMAT_VERSION, Manifest
from agent_leaderboard.records.results import line_record, write_line
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.episodes import TextSource, view_episodes
from agent_leaderboard.report.summary import read_run

_FEATURE: Final = "Logs of inspect_ai"


def export(run: Path, folder: Path, data: Path | None = None) -> None:
    """Write one log for each agent on each environment, ``<environment>_<agent>.eval``.

    With the `data` folder, logs hold the text of licensed data sets as well: they are then for
    one's own eyes. Look at them with ``inspect view``.

    Raises:
        DataError: If the run folder cannot be read.
        MissingExtraError: If inspect_ai is not installed.
    """
    require_extra("inspect", _FEATURE, "inspect_ai")
    from inspect_ai.log import write_eval_log

    played = read_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    with closing(TextSource(played.manifest, data)) as source:
        for cell in tqdm(played.lines, desc="logs", unit="log"):
            is_shown = played.manifest.environment(cell[0]).is_text_public or data is not None
            episodes = list(view_episodes(played, cell, source if is_shown else None))
            tasks = RunFolder(run).read_tasks(cell[0])
            log = make_log(played.manifest, cell, tasks, episodes)
            write_eval_log(log, str(folder / f"{cell[0]}_{cell[1]}.eval"))


def import_logs(logs: Sequence[Path], out: Path) -> None:
    """Make a run folder, which is new or empty, of ``.eval`` or ``.json`` files or folders of them.

    Raises:
        ConfigurationError: If `out` holds something, or there is no log.
        DataError: If a log cannot be read, or logs do not fit each other; names the log.
        MissingExtraError: If inspect_ai is not installed.
    """
    require_extra("inspect", _FEATURE, "inspect_ai")
    if out.exists() and any(out.iterdir()):
        raise ConfigurationError(f"{out}: is not empty. Name a new folder for the run.")
    paths = [path for given in logs for path in _log_files(given)]
    if not paths:
        raise ConfigurationError("There is no log to read: name .eval or .json files, or a folder.")
    contents = [(path, read_contents(path)) for path in tqdm(paths, desc="logs", unit="log")]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        made = Path(temporary) / "run"
        _write_run(contents, made)
        if out.exists():
            out.rmdir()
        made.rename(out)


def _log_files(given: Path) -> list[Path]:
    if given.is_dir():
        return sorted(path for path in given.iterdir() if path.suffix in (".eval", ".json"))
    return [given]


def _write_run(contents: Sequence[tuple[Path, LogContents]], folder: Path) -> None:
    run = RunFolder(folder)
    known: dict[tuple[str, str], Any] = {}
    for path, log in contents:
        record = log.record
        environment, agent = record.environment.slug, record.agent.slug
        told = {
            ("run", "protocol"): record.protocol,
            ("environment", environment): record.environment,
            ("tasks", environment): record.tasks,
            ("agent", agent): record.agent,
        }
        for (kind, name), value in told.items():
            if known.setdefault((kind, name), value) != value:
                raise DataError(
                    f"{path}: {name} is not as in the logs before it, so their results cannot "
                    "stand in one table. Import them into a run of their own."
                )
        results = run.results_path(environment, agent)
        if results.exists():
            raise DataError(f"{path}: another log holds {agent} on {environment} already.")
        run.write_tasks(environment, record.tasks)
        write_text(results, "".join(write_line(line_record(line)) for line in log.lines))
        if None not in log.seconds:
            seconds = (
                write_line({"task": line.task, "sample": line.sample, "seconds": seconds})
                for line, seconds in zip(log.lines, log.seconds, strict=True)
            )
            write_text(run.seconds_path(environment, agent), "".join(seconds))
    records = [log.record for _, log in contents]
    # In the order of the run they came from; without one, as they were read.
    environments = [r.environment for r in sorted(records, key=lambda r: r.position[0])]
    agents = [r.agent for r in sorted(records, key=lambda r: r.position[1])]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        protocol=records[0].protocol,
        environments=list({one.slug: one for one in environments}.values()),
        agents=list({one.slug: one for one in agents}.values()),
        left_out=records[0].left_out,
    )
    run.write_manifest(manifest)
    read_run(folder)  # what a log of others says is checked as it is read
    if all(run.results_path(e.slug, a.slug).exists() for e, a in manifest.cells):
        run.write_checksums(manifest)
