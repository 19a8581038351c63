"""Checks of a run without replay: files, checksums, task lists, completeness, and environments."""

import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_envs.errors import DataError
from agent_leaderboard.play.environments import (
    data_files,
    data_path,
    environment_seal,
    missing_data,
    recorded_environment,
)
from agent_leaderboard.play.run import WORK
from agent_leaderboard.play.tasks import draw_tasks, list_tasks, open_tool_env
from agent_leaderboard.records.manifest import EnvironmentRecord, Protocol, manifest_text
from agent_leaderboard.records.reading import MAX_FILE_BYTES, file_sha256, read_text
from agent_leaderboard.records.results import (
    CHECKSUMS,
    FILES,
    MANIFEST,
    EpisodeResult,
    Run,
    TaskEntry,
    list_episodes,
    read_checksums,
    task_list_sha256,
)
from agent_leaderboard.report.tables import PAGES, REPORTS
from agent_leaderboard.verify.claims import check_usage


class MissingDataError(DataError):
    """Required data are not on this machine."""


def check_folder(run: Path) -> Iterator[str]:
    """Yield everything in a folder that is not a regular file of a run; opens nothing."""
    known = {*FILES, *REPORTS, *PAGES}
    try:
        entries = sorted(os.scandir(run), key=lambda entry: entry.name)
    except OSError as error:
        yield f"{run}: cannot be read ({error.strerror})"
        return
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        if entry.name == WORK and stat.S_ISDIR(status.st_mode):
            continue
        if entry.name not in known:
            yield f"{ascii(entry.name)[1:-1]}: is not part of a run"
        elif not stat.S_ISREG(status.st_mode):
            yield f"{entry.name}: is not a regular file"
        elif status.st_size > MAX_FILE_BYTES:
            yield f"{entry.name}: is too large"


def check_files(folder: Path, run: Run) -> Iterator[str]:
    """Yield what is wrong with the form of the manifest, the checksums and the task lists."""
    manifest = run.manifest
    if read_text(folder / MANIFEST) != manifest_text(manifest):
        yield f"{MANIFEST}: is not in the canonical form"
    checksums = read_checksums(folder)
    truth = {name: file_sha256(folder / name) for name in FILES if name != CHECKSUMS}
    for name in sorted(truth.keys() | checksums.keys()):
        if truth.get(name) != checksums.get(name):
            yield f"{ascii(name)[1:-1]}: does not match its checksum in {CHECKSUMS}"
    slugs = [environment.slug for environment in manifest.environments]
    if list(run.tasks) != slugs:
        yield f"tasks.json: has other environments than {MANIFEST}"
    for environment in manifest.environments:
        entries, place = run.tasks.get(environment.slug, ()), f"tasks.json, {environment.slug!r}"
        if task_list_sha256(entries) != environment.tasks_sha256:
            yield f"{place}: is not the task list of {MANIFEST} (field 'tasks_sha256')"
        if len(entries) != environment.num_tasks:
            yield f"{place}: has {len(entries)} tasks; 'num_tasks' is {environment.num_tasks}"
        if len({entry.task for entry in entries}) < len(entries):
            yield f"{place}: lists a task twice"


def check_results(run: Run) -> Iterator[str]:
    """Yield missing, repeated and unlisted episodes, and impossible costs."""
    protocol = run.manifest.protocol
    for environment, agent in run.manifest.cells:
        wanted = [(e.task, s) for e, s in list_episodes(run.tasks[environment.slug], protocol)]
        results = run.results[environment.slug, agent.slug]
        found = [(result.task, result.sample) for result in results]
        if found != wanted:
            counts, listed = Counter(found), Counter(wanted)
            name = f"results.parquet, {environment.slug}/{agent.slug}"
            for task, sample in listed - counts:
                yield f"{name}: task {task}, sample {sample} is missing"
            for task, sample in counts - listed:
                yield f"{name}: task {task}, sample {sample} is not listed, or is repeated"
            if counts == listed:
                yield f"{name}: episodes are not in the order of the task list"
        for result in results:
            for text in check_usage(result, agent, protocol, environment.max_turns):
                yield f"{place(result)}, {text}"


def place(result: EpisodeResult) -> str:
    """Name an episode in messages."""
    name = f"{result.environment}/{result.agent}"
    return f"results.parquet, {name}, task {result.task}, sample {result.sample}"


def check_environment(
    environment: EnvironmentRecord,
    protocol: Protocol,
    tasks: Sequence[TaskEntry],
    data: Path | None,
) -> list[str]:
    """Return how manifest and task list differ from the environment itself.

    Raises:
        MissingDataError: If its data are missing.
        MissingExtraError: If a required package is missing.
        AgentEnvsError: If it cannot be made, is not allowed, or names other data files.
    """
    if missing := missing_data(environment, data):
        raise MissingDataError(
            "its data are missing; pass --data, or set AGENT_R1_DATA"
            if data is None
            else f"{data / missing} does not exist"
        )
    env, max_turns = open_tool_env(recorded_environment(environment, None, data))
    files = data_files(environment, data)
    record = f"{MANIFEST}, environment {environment.slug!r}"
    problems = [f"{record}, field 'data': {text}" for text in _check_data(environment, files, data)]
    truth = {
        "max_turns": max_turns,
        "is_text_public": not files,
        "reward_terms": dict(env.reward_weights),
        "outcome_terms": sorted(env.outcome_terms & env.reward_weights.keys()),
    }
    source = "the environment has"
    problems += [f"{record}, {text}" for text in differences(environment, truth, source)]
    name = f"tasks.json, {environment.slug!r}"
    if [entry.task for entry in tasks] != draw_tasks(env, len(tasks), protocol.seed):
        problems.append(
            f"{name}, field 'task': not the {len(tasks)} tasks of the seed {protocol.seed}"
        )
    seal = environment_seal(environment, data)
    for number, entry in enumerate(tasks, start=1):
        where = f"{name}, entry {number}"
        if env.num_tasks is not None and entry.task >= env.num_tasks:
            problems.append(f"{where}, field 'task': there is no task {entry.task}")
            continue
        (actual,) = list_tasks(env, [entry.task], seal)
        truth = {name: getattr(actual, name) for name in ("task_id", "sha256", "labels")}
        problems += [f"{where}, {text}" for text in differences(entry, truth, source)]
    env.close()
    return problems


def _check_data(
    environment: EnvironmentRecord, files: Sequence[str], data: Path | None
) -> Iterator[str]:
    """Compare the data files with those of the run; nothing outside `files` is read."""
    recorded = {file.name: file.sha256 for file in environment.data}
    for name in recorded.keys() - set(files):
        raise DataError(f"field 'data': {name!r} is not a file of the arguments")
    for name in files:
        if name not in recorded:
            yield f"{name} is missing"
        elif file_sha256(data_path(name, data)) != recorded[name]:
            yield f"{name} differs from the file of the run (SHA-256)"


def differences(
    record: object, truth: Mapping[str, Any], source: str, show: Callable[[Any], str] = repr
) -> Iterator[str]:
    """Yield each field of a record that differs, as JSON, from `truth`: -0.0 is not 0.0."""
    for name, value in truth.items():
        recorded = getattr(record, name)
        if json.dumps(recorded, sort_keys=True) != json.dumps(value, sort_keys=True):
            yield f"field {name.rstrip('_')!r}: is {show(recorded)}, {source} {show(value)}"
