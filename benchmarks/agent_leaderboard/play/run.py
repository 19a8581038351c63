"""Run what a configuration says, into a folder; a run that was stopped goes on.

Chunks of episodes are played in worker processes; the process that was started alone writes, whole
chunks in order, so that a run has the same bytes however often it was interrupted. An outage pauses
a run, and whoever gives the command again has the episodes that faults ended played again.
"""

import bisect
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, RolloutError
from agent_leaderboard.agents.agent import find_kind
from agent_leaderboard.play.config import RunConfig
from agent_leaderboard.play.episodes import (
    OUTAGE_EPISODES,
    Chunk,
    TimedLine,
    check_chunk,
    list_episodes,
    play_chunk,
)
from agent_leaderboard.play.prepare import find_model, prepare
from agent_leaderboard.play.processes import run_all
from agent_leaderboard.records.manifest import Manifest, manifest_text
from agent_leaderboard.records.reading import read_lines
from agent_leaderboard.records.results import (
    ResultLine,
    TaskEntry,
    line_record,
    parse_line,
    parse_seconds,
    write_line,
)
from agent_leaderboard.records.run_folder import RunFolder


def run(config: RunConfig, output: Path, *, data: Path | None = None, jobs: int = 1) -> RunFolder:
    """Play what is missing, and again what faults ended; write all that a run consists of.

    That is manifest, task lists, results and, at the end, checksums. `data` is what ``${data}``
    stands for; `jobs` processes play, 1 plays in this one.

    Raises:
        ConfigurationError: If the folder holds another run, or is in use.
        RolloutError: If one episode after the other fails through no fault of the agent.
    """
    folder = RunFolder(output)
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        models = {agent.slug: find_model(agent, output / "work") for agent in config.agents}
        manifest, tasks = prepare(config, models, data)
        cells = list(_cells(config, folder, manifest, tasks, models, data))
        for cell in cells:
            check_chunk(cell.chunks[0])
        _settle(folder, manifest, tasks)
        faults = [(cell, chunk) for cell in cells for chunk in cell.fault_chunks()]
        if not folder.checksums_path.exists() or faults:
            folder.checksums_path.unlink(missing_ok=True)
            _play(cells, jobs)
            _play_again(faults, jobs)
            folder.write_checksums(manifest)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process from writing into the same folder; released when this one ends."""
    if sys.platform == "win32":
        raise ConfigurationError(f"{folder}: cannot be locked on Windows; play in WSL or on Linux.")
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigurationError(
            f"{folder}: another process is running it. Wait for it, or choose another --output."
        ) from None
    try:
        yield
    finally:
        os.close(handle)


def _settle(folder: RunFolder, manifest: Manifest, tasks: Mapping[str, list[TaskEntry]]) -> None:
    """Write task lists and manifest, or see that the manifest in the folder is the same."""
    path = folder.manifest_path
    if not path.exists():
        for slug, entries in tasks.items():
            folder.write_tasks(slug, entries)
        folder.write_manifest(manifest)  # last: where it is, the lists are
        return
    there, wanted = path.read_text(encoding="utf-8"), manifest_text(manifest)
    if there != wanted:
        pairs = zip(there.splitlines(), wanted.splitlines(), strict=False)
        old, new = next(((a, b) for a, b in pairs if a != b), ("its end", "more"))
        raise ConfigurationError(
            f"{folder.path}: holds another run: its manifest says {old.strip()!r} where this one "
            f"has {new.strip()!r}. Choose another --output, or delete the folder."
        )


# Playing


@dataclass(frozen=True, slots=True)
class _Cell:
    """The episodes of an agent in an environment, in chunks."""

    results: Path
    seconds: Path
    chunks: list[Chunk]

    def num_chunks_done(self) -> int:
        """Return how many chunks are written whole, and cut off what is written beyond them."""
        paths = [path for path in (self.results, self.seconds) if path.exists()]
        written = min(path.read_bytes().count(b"\n") for path in paths) if len(paths) == 2 else 0
        ends = list(itertools.accumulate(len(chunk.episodes) for chunk in self.chunks))
        done = bisect.bisect_right(ends, written)
        for path in paths:
            _keep_lines(path, ends[done - 1] if done else 0)
        return done

    def write(self, lines: Sequence[TimedLine]) -> None:
        """Append a chunk."""
        seconds, results = _texts(lines)
        # Seconds first: where there are results, there are seconds.
        _append(self.seconds, seconds)
        _append(self.results, results)

    def fault_chunks(self) -> list[Chunk]:
        """Return the episodes that are written and that a fault ended."""
        self.num_chunks_done()
        lines = [timed.line for timed in self._read()]
        failed = {(line.task, line.sample) for line in lines if not line.is_scored}
        chunks = (
            replace(chunk, episodes=[(t, s) for t, s in chunk.episodes if (t.task, s) in failed])
            for chunk in self.chunks
        )
        return [chunk for chunk in chunks if chunk.episodes]

    def rewrite(self, lines: Sequence[TimedLine]) -> None:
        """Put episodes that were played again in the place of those that faults ended."""
        again = {(timed.line.task, timed.line.sample): timed for timed in lines}
        written = [again.get((one.line.task, one.line.sample), one) for one in self._read()]
        seconds, results = _texts(written)
        write_text(self.seconds, seconds)
        write_text(self.results, results)

    def _read(self) -> list[TimedLine]:
        if not (self.results.exists() and self.seconds.exists()):
            return []
        lines = [
            parse_line(text, f"{self.results}, line {n}") for n, text in read_lines(self.results)
        ]
        seconds = [
            parse_seconds(text, f"{self.seconds}, line {n}").seconds
            for n, text in read_lines(self.seconds)
        ]
        return [TimedLine(*pair) for pair in zip(lines, seconds, strict=True)]


def _texts(lines: Sequence[TimedLine]) -> tuple[str, str]:
    """Return what is written of some episodes: their seconds, and their results."""
    seconds = [
        {"task": timed.line.task, "sample": timed.line.sample, "seconds": timed.seconds}
        for timed in lines
    ]
    results = [line_record(timed.line) for timed in lines]
    return "".join(map(write_line, seconds)), "".join(map(write_line, results))


def _cells(
    config: RunConfig,
    folder: RunFolder,
    manifest: Manifest,
    tasks: Mapping[str, list[TaskEntry]],
    models: Mapping[str, str | None],
    data: Path | None,
) -> Iterator[_Cell]:
    protocol = manifest.protocol
    settings = {agent.slug: agent.settings for agent in config.agents}
    for environment, agent in manifest.cells:
        own = dict(settings[agent.slug])
        if find_kind(agent.kind).needs_model:
            own = {"temperature": protocol.temperature, "concurrency": protocol.concurrency, **own}
        if (model := models[agent.slug]) is not None:
            own["model"] = model
        episodes = list_episodes(tasks[environment.slug], protocol)
        yield _Cell(
            folder.results_path(environment.slug, agent.slug),
            folder.seconds_path(environment.slug, agent.slug),
            [
                Chunk(
                    environment=environment,
                    agent=agent,
                    agent_settings=own,
                    protocol=protocol,
                    episodes=episodes[start : start + protocol.concurrency],
                    data=data,
                )
                for start in range(0, len(episodes), protocol.concurrency)
            ],
        )


def _play(cells: Sequence[_Cell], jobs: int) -> None:
    """Play the chunks that are missing, and write each when all before it are written."""
    done = [cell.num_chunks_done() for cell in cells]
    missing = [
        (number, index)
        for number, cell in enumerate(cells)
        for index in range(done[number], len(cell.chunks))
    ]
    total = sum(len(chunk.episodes) for cell in cells for chunk in cell.chunks)
    left = sum(len(cells[number].chunks[index].episodes) for number, index in missing)
    played: dict[tuple[int, int], list[TimedLine]] = {}
    streaks = [0] * len(cells)
    with tqdm(total=total, initial=total - left, desc="playing", unit="episode") as bar:
        chunks = [cells[number].chunks[index] for number, index in missing]
        for position, lines in run_all(play_chunk, chunks, jobs):
            played[missing[position]] = lines
            number, _ = missing[position]
            while (ready := (number, done[number])) in played:
                cells[number].write(written := played.pop(ready))
                done[number] += 1
                streaks[number] = _count_faults([timed.line for timed in written], streaks[number])
            bar.update(len(lines))
            _tell_faults([timed.line for timed in lines])
            if streaks[number] >= OUTAGE_EPISODES:
                raise _outage(lines[-1].line)


def _play_again(faults: Sequence[tuple[_Cell, Chunk]], jobs: int) -> None:
    """Play the episodes once more that faults ended before."""
    if not faults:
        return
    total = sum(len(chunk.episodes) for _, chunk in faults)
    with tqdm(total=total, desc="faults, again", unit="episode") as bar:
        for position, lines in run_all(play_chunk, [chunk for _, chunk in faults], jobs):
            faults[position][0].rewrite(lines)
            bar.update(len(lines))
            _tell_faults([timed.line for timed in lines])


# Faults


def _count_faults(lines: Sequence[ResultLine], before: int) -> int:
    """Return how many episodes in a row have failed, up to the last of `lines`."""
    for line in lines:
        before = 0 if line.is_scored else before + 1
    return before


def _tell_faults(lines: Sequence[ResultLine]) -> None:
    """Say how many episodes faults ended, and what the first one was."""
    if faults := [line for line in lines if not line.is_scored]:
        first = faults[0]
        tqdm.write(
            f"{first.agent} on {first.environment}: {len(faults)} of {len(lines)} episodes ended "
            f"by a fault, not scored: {first.error}",
            file=sys.stderr,
        )


def _outage(line: ResultLine) -> RolloutError:
    return RolloutError(
        f"Paused: at least the last {OUTAGE_EPISODES} episodes of {line.agent!r} on "
        f"{line.environment!r} ended by a fault ({line.error}). When that is "
        "mended, give the same command again: it goes on, and plays them again."
    )


# Files of lines


def _keep_lines(path: Path, count: int) -> None:
    """Cut a file after so many lines; also cuts a last one that is not whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    kept, written = (sum(map(len, some)) for some in (lines[:count], lines))
    if kept < written:
        with path.open("r+b") as file:
            file.truncate(kept)


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())
