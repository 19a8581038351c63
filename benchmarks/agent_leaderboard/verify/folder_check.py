"""What stands in a run's folder, seen without playing: form, checksums, completeness."""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from agent_envs.errors import DataError
from agent_leaderboard.play.episodes import episode_seed, list_episodes
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Protocol,
    manifest_text,
)
from agent_leaderboard.records.reading import (
    MAX_FILE_BYTES,
    file_sha256,
    read_lines,
    read_text,
)
from agent_leaderboard.records.results import (
    ResultLine,
    TaskEntry,
    parse_line,
    tasks_text,
)
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.tables import PAGE_WITH_TEXT, REPORTS
from agent_leaderboard.verify.claims import check_usage
from agent_leaderboard.verify.replay_check import differences

MAX_FILES: Final = 20_000
MAX_BYTES: Final = 2 * 2**30
_OWN: Final = "work"
"""What a run keeps for itself: models it trained."""


def check_tree(run: Path) -> Iterator[str]:
    """Yield what no folder of a run holds: links, pipes, devices, too many files, too large ones.

    Nothing of it is opened, and no link is followed.
    """
    waiting, count, size = [run], 0, 0
    while waiting:
        folder = waiting.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            yield f"{folder}: cannot be read ({error.strerror})"
            continue
        for entry in entries:
            count += 1
            status = entry.stat(follow_symlinks=False)
            size += status.st_size
            if count > MAX_FILES or size > MAX_BYTES:
                yield f"{run}: holds more than {MAX_FILES:,} files, or {MAX_BYTES:,} bytes"
                return
            if stat.S_ISDIR(status.st_mode):
                if folder == run and entry.name == _OWN:
                    continue
                waiting.append(Path(entry.path))
            elif not stat.S_ISREG(status.st_mode):
                yield f"{Path(entry.path).relative_to(run)!s}: is no plain file"
            elif status.st_size > MAX_FILE_BYTES:
                yield f"{Path(entry.path).relative_to(run)!s}: is too large"


def check_files(folder: RunFolder, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with the manifest's form and with the checksums."""
    if read_text(folder.manifest_path) != manifest_text(manifest):
        yield "manifest.json: is not in the form in which manifests are written"
    try:
        checksums = folder.read_checksums()
    except DataError as error:
        yield str(error)
        return
    expected = set(folder.expected_files(manifest))
    yield from (
        f"checksums.json: {name} is missing" for name in sorted(expected - checksums.keys())
    )
    yield from (
        f"checksums.json: {name!r} is no file of this run"
        for name in sorted(checksums.keys() - expected)
    )
    for name in sorted(expected & checksums.keys()):
        try:
            if file_sha256(folder.path / name) != checksums[name]:
                yield f"{name}: its checksum is not that in checksums.json"
        except DataError as error:
            yield str(error)
    yield from _check_more_files(folder, manifest, expected)


def _check_more_files(folder: RunFolder, manifest: Manifest, expected: set[str]) -> Iterator[str]:
    """Yield files and folders that no run has: whoever opens the folder takes them for its own."""
    seconds = [folder.seconds_path(e.slug, a.slug) for e, a in manifest.cells]
    known = {folder.checksums_path.name, *REPORTS, PAGE_WITH_TEXT} | expected
    known |= {path.relative_to(folder.path).as_posix() for path in seconds}
    folders = {parent.as_posix() for name in known for parent in PurePosixPath(name).parents}
    waiting = [folder.path]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(folder.path).as_posix()
            if not path.is_dir():
                if name not in known:
                    yield f"{name}: is no file of this run"
            elif name in folders:
                waiting.append(path)
            elif name != _OWN:
                yield f"{name}: is no folder of this run"


def read_tasks(
    folder: RunFolder, environment: EnvironmentRecord, problems: list[str]
) -> list[TaskEntry]:
    """Return a task list, as far as it can be read; add what is wrong with it to `problems`."""
    name = environment.tasks_path
    try:
        entries = folder.read_tasks(environment.slug)
        digest = file_sha256(folder.path / name)
        text = read_text(folder.tasks_path(environment.slug))
    except DataError as error:
        problems.append(str(error))
        return []
    if text != tasks_text(entries):
        problems.append(f"{name}: is not in the form in which task lists are written")
    if digest != environment.tasks_sha256:
        problems.append(f"{name}: is not the task list of the manifest (field 'tasks_sha256')")
    if len(entries) != environment.num_tasks:
        problems.append(
            f"{name}: has {len(entries)} tasks; manifest.json, field 'num_tasks' says "
            f"{environment.num_tasks}"
        )
    for task, count in Counter(entry.task for entry in entries).items():
        if count > 1:
            problems.append(f"{name}: task {task} is listed {count} times")
    return entries


def read_results(
    folder: RunFolder,
    protocol: Protocol,
    environment: EnvironmentRecord,
    agent: AgentRecord,
    tasks: Sequence[TaskEntry],
    problems: list[str],
) -> list[tuple[int, ResultLine]]:
    """Return the lines of listed episodes, each with its number in the file."""
    name = f"results/{environment.slug}/{agent.slug}.jsonl"
    wanted = [(entry.task, sample) for entry, sample in list_episodes(tasks, protocol)]
    lines: list[tuple[int, ResultLine]] = []
    try:
        for number, text in read_lines(folder.results_path(environment.slug, agent.slug)):
            if number > 2 * len(wanted) + 100:
                raise DataError(f"{name}, line {number}: there are {len(wanted)} episodes")
            try:
                lines.append((number, parse_line(text, f"{name}, line {number}")))
            except DataError as error:
                problems.append(str(error))
    except DataError as error:
        problems.append(str(error))
    by_task = {entry.task: entry for entry in tasks}
    for number, line in lines:
        # What a line must say because of where it stands.
        expected: dict[str, Any] = {
            "environment": environment.slug,
            "agent": agent.slug,
            "seed": episode_seed(protocol, line.task, line.sample),
        }
        if entry := by_task.get(line.task):
            expected |= {"task_id": entry.task_id, "task_sha256": entry.sha256}
            expected["labels"] = entry.labels
        texts = [
            *differences(line, expected, "must be"),
            *check_usage(line, agent, protocol, environment.max_turns),
        ]
        problems += [f"{name}, line {number}, {text}" for text in texts]
    problems += [f"{name}{text}" for text in _check_order(wanted, lines)]
    problems += _check_seconds(folder, environment.slug, agent.slug, wanted)
    listed = set(wanted)
    return [(number, line) for number, line in lines if (line.task, line.sample) in listed]


def _check_order(
    wanted: Sequence[tuple[int, int]], lines: Sequence[tuple[int, ResultLine]]
) -> Iterator[str]:
    """Yield episodes that are missing, there twice, of no task, or in another order."""
    found = [(line.task, line.sample) for _, line in lines]
    listed, there, seen = set(wanted), set(found), set[tuple[int, int]]()
    for task, sample in wanted:
        if (task, sample) not in there:
            yield f": task {task}, sample {sample} is missing"
    for (number, line), episode in zip(lines, found, strict=True):
        if episode not in listed:
            yield f", line {number}, field 'task': {episode} is not listed"
        elif episode in seen:
            yield f", line {number}, field 'task': task {line.task} is there twice"
        seen.add(episode)
    if sorted(found) == sorted(wanted) and found != wanted:
        number = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True), 1) if a != b)
        yield f", line {number}, field 'task': episodes are not in the order of the task list"


def _check_seconds(
    folder: RunFolder, environment: str, agent: str, wanted: Sequence[tuple[int, int]]
) -> Iterator[str]:
    """Yield what no clock says; how long episodes took stays on trust, and may be left out."""
    path = folder.seconds_path(environment, agent)
    if not path.exists():
        return
    name = path.relative_to(folder.path).as_posix()
    try:
        found = folder.read_seconds(environment, agent)
    except DataError as error:
        yield str(error).replace(str(path), name)
        return
    if [(line.task, line.sample) for line in found] != list(wanted):
        yield f"{name}: has other episodes than the results"
