"""Run a configuration into a folder; the same command resumes a run that was stopped.

Worker processes run chunks of episodes; the main process appends each finished chunk to a journal,
and writes the results when the run is complete. Results do not depend on interruptions. An outage
pauses a run; episodes that ended by an infrastructure failure run again, with new retries, when it
is resumed. The costs of all tries count.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from tqdm.auto import tqdm

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, RolloutError
from agent_leaderboard.agents.agent import build_agent
from agent_leaderboard.play.config import RunConfig
from agent_leaderboard.play.environments import configured_environment
from agent_leaderboard.play.episodes import OUTAGE_EPISODES, Chunk, run_chunk
from agent_leaderboard.play.prepare import complete_settings, find_model, prepare
from agent_leaderboard.records.manifest import ORIGIN, Manifest, read_manifest, to_json
from agent_leaderboard.records.results import (
    CHECKSUMS,
    MANIFEST,
    RESULTS,
    EpisodeResult,
    Run,
    TaskEntry,
    from_row,
    list_episodes,
    read_run,
    to_row,
    write_run,
)
from agent_trainers.policies import Usage

WORK: Final = "work"
"""Subfolder of the journal of a run that is not complete."""
_JOURNAL: Final = "episodes.jsonl"
Results = dict[tuple[str, str, int, int], EpisodeResult]
Job = TypeVar("Job")
Result = TypeVar("Result")


def run(config: RunConfig, output: Path, *, data: Path | None = None, jobs: int = 1) -> Path:
    """Run the missing episodes, and those that ended by a failure; return the folder.

    `data` replaces ``${data}``. More than one of `jobs` are separate processes.
    """
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output):
        manifest, tasks = prepare(config, data)
        if (output / MANIFEST).exists():
            manifest = _with_origin(manifest, read_manifest(output / MANIFEST))
        chunks = list(_chunks(config, manifest, tasks, data))
        for chunk in {chunk.cell: chunk for chunk in chunks}.values():  # before any model is loaded
            build_agent(chunk.agent.kind, chunk.settings).check(chunk.make_env)
        if not (output / MANIFEST).exists():
            write_text(output / MANIFEST, to_json(manifest))
        elif (output / MANIFEST).read_text(encoding="utf-8") != to_json(manifest):
            raise ConfigurationError(
                f"{output}: contains another run, or one of other package versions: its {MANIFEST} "
                "differs. Choose another --output, or delete the folder."
            )
        journal = output / WORK / _JOURNAL
        done = _read_done(output, journal)
        if missing := list(_missing(chunks, done)):
            journal.parent.mkdir(exist_ok=True)
            _run_chunks(missing, done, journal, jobs)
        if missing or not (output / CHECKSUMS).exists():
            results = {
                (e.slug, a.slug): [
                    done[e.slug, a.slug, entry.task, sample]
                    for entry, sample in list_episodes(tasks[e.slug], manifest.protocol)
                ]
                for e, a in manifest.cells
            }
            write_run(output, Run(manifest=manifest, tasks=tasks, results=results))
        journal.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            journal.parent.rmdir()
    return output


def _with_origin(manifest: Manifest, earlier: Manifest) -> Manifest:
    """Return the manifest with the date and the commit at which the run began."""
    known = {agent.slug: agent for agent in earlier.agents}
    agents = [
        replace(agent, **{name: getattr(known.get(agent.slug, agent), name) for name in ORIGIN})
        for agent in manifest.agents
    ]
    return replace(manifest, agents=agents)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    import fcntl  # not on Windows

    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigurationError(
            f"{folder}: another process is using it. Wait for it, or choose another --output."
        ) from None
    finally:
        os.close(handle)


def _chunks(
    config: RunConfig,
    manifest: Manifest,
    tasks: Mapping[str, list[TaskEntry]],
    data: Path | None,
) -> Iterator[Chunk]:
    protocol = manifest.protocol
    configured = {agent.slug: agent for agent in config.agents}
    for environment, agent in manifest.cells:
        entry = configured[agent.slug]
        own = complete_settings(entry, protocol, find_model(entry))
        make_env = configured_environment(environment, agent.tool_format, data)
        episodes = list_episodes(tasks[environment.slug], protocol)
        for start in range(0, len(episodes), protocol.concurrency):
            yield Chunk(
                environment=environment, agent=agent, make_env=make_env, settings=own, data=data,
                protocol=protocol, episodes=episodes[start : start + protocol.concurrency],
            )  # fmt: skip


def _read_done(folder: Path, journal: Path) -> Results:
    """Return the episodes of a complete run, and those of its journal; cut off a partial line."""
    done: Results = {}
    if (folder / RESULTS).exists():
        done = {one.key: one for own in read_run(folder).results.values() for one in own}
    if journal.exists():
        lines = journal.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(journal, sum(map(len, lines[:-1])))
            lines.pop()
        for number, line in enumerate(lines, start=1):
            results = (from_row(row, f"{journal}, line {number}") for row in json.loads(line))
            done |= {result.key: result for result in results}
    return done


def _missing(chunks: Sequence[Chunk], done: Results) -> Iterator[Chunk]:
    """Yield chunks that were not run, and the failed episodes of the others."""
    for chunk in chunks:
        known = [done.get((*chunk.cell, entry.task, sample)) for entry, sample in chunk.episodes]
        pairs = zip(chunk.episodes, known, strict=True)
        failed = [(one, result) for one, result in pairs if result and not result.is_scored]
        if None in known:
            yield chunk
        elif failed:
            spent = [
                Usage(
                    calls=result.calls,
                    prompt_tokens=result.prompt_tokens,
                    completion_tokens=result.completion_tokens,
                )
                for _, result in failed
            ]
            yield replace(chunk, episodes=[episode for episode, _ in failed], spent=spent)


def _run_chunks(chunks: Sequence[Chunk], done: Results, journal: Path, jobs: int) -> None:
    failures: dict[tuple[str, str], int] = {}
    total = sum(len(chunk.episodes) for chunk in chunks)
    with tqdm(total=total, desc="running", unit="episode") as bar, journal.open("ab") as file:
        for number, results in run_all(run_chunk, chunks, jobs):
            place = chunks[number].cell
            rows = json.dumps([to_row(result) for result in results])
            file.write(rows.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            done |= {result.key: result for result in results}
            bar.update(len(results))
            if failed := [result for result in results if not result.is_scored]:
                tqdm.write(
                    f"{place[1]} on {place[0]}: {len(failed)} of {len(results)} episodes ended by "
                    f"an infrastructure failure: {failed[0].error}",
                    file=sys.stderr,
                )
            for result in results:
                failures[place] = 0 if result.is_scored else failures.get(place, 0) + 1
            if failures[place] >= OUTAGE_EPISODES:
                raise RolloutError(
                    f"Paused: {failures[place]} episodes in a row of {place[1]!r} on {place[0]!r} "
                    f"ended by an infrastructure failure ({results[-1].error}). Fix the cause and "
                    "repeat the command: it runs them again."
                )


# Processes


def run_all(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    processes: int,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield number and result of each job when it is done; one process is this one, in order.

    Each worker process calls `prepare` first, computes on one thread, and ends with its parent.
    """
    if processes == 1 or len(jobs) < 2:
        for number, job in enumerate(jobs):
            yield number, function(job)
        return
    context = multiprocessing.get_context("spawn")  # forking a process with threads is unsafe
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_prepare_worker, initargs=(prepare,)
    ) as pool:
        futures = {pool.submit(function, job): number for number, job in enumerate(jobs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_worker(prepare: Callable[[], None] | None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # before a job imports torch
    end_with_parent(lambda: os._exit(1))
    if prepare is not None:
        prepare()


def end_with_parent(end: Callable[[], object]) -> None:
    """Call `end` when the parent process is gone, however it ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end()

    threading.Thread(target=watch, daemon=True).start()
