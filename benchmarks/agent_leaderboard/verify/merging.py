"""Copying a run, and merging the runs of several."""

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import (
    MEASURED_FIELDS,
    AgentRecord,
    LeftOut,
    Manifest,
    differences,
)
from agent_leaderboard.records.names import misleading_names
from agent_leaderboard.records.results import (
    CHECKSUMS,
    FILES,
    Cell,
    EpisodeResult,
    Run,
    make_checksums,
    read_checksums,
    read_run,
    write_run,
)
from agent_leaderboard.verify.verify import Verification, check_folder


def copy_run(run: Path, folder: Path) -> None:
    """Copy the files of a complete run, and nothing else, into a new folder."""
    for problem in check_folder(run):
        raise DataError(f"{run}: {problem}.")
    if read_checksums(run) != make_checksums(run):
        raise DataError(f"{run}: a file does not match {CHECKSUMS}; verify the run.")
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(run / name, folder / name)


def merge(
    output: Path,
    folders: Sequence[Path],
    data: Path | None,
    verify: Callable[..., Verification],
    **options: Any,
) -> Path:
    """Verify runs, and merge them into a new one; return its folder."""
    if output.exists():
        raise ConfigurationError(f"{output}: exists; choose a new folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merge-") as scratch:
        runs = {}
        for number, original in enumerate(folders):
            copy = Path(scratch) / str(number)
            copy_run(original, copy)
            found = verify(copy, data, **options)
            if not found.is_whole:
                raise DataError(f"{original}: cannot be verified here.\n{found.summary()}")
            runs[original] = read_run(copy)
        joined = Path(scratch) / "joined"
        joined.mkdir()
        write_run(joined, merge_runs(runs))
        joined.rename(output)
    return output


def merge_runs(runs: Mapping[Path, Run]) -> Run:
    """Merge the agents of several runs on all environments; they need not have run on all."""
    (first, model), *_ = ((folder, run.manifest) for folder, run in runs.items())
    environments = {one.slug: one for one in model.environments}
    agents: dict[str, AgentRecord] = {}
    tasks = {slug: own for run in runs.values() for slug, own in run.tasks.items()}
    results: dict[Cell, Sequence[EpisodeResult]] = {}
    left_out: dict[LeftOut, None] = {}
    for folder, run in runs.items():
        manifest = run.manifest
        changes = [
            f"protocol, {text}"
            for text in differences(manifest.protocol, model.protocol, MEASURED_FIELDS)
        ]
        for environment in manifest.environments:
            known = environments.setdefault(environment.slug, environment)
            same = dataclasses.replace(environment, contamination=known.contamination)
            slug = environment.slug
            changes += [f"environment {slug!r}, {text}" for text in differences(same, known)]
        for agent in manifest.agents:
            record = dataclasses.replace(agent, not_played=[])
            known_agent = agents.setdefault(agent.slug, record)
            changes += [
                f"agent {agent.slug!r}, {text}" for text in differences(record, known_agent)
            ]
        for cell, own in run.results.items():
            if _without_seconds(results.setdefault(cell, own)) != _without_seconds(own):
                changes.append(f"agent {cell[1]!r}: acts otherwise on {cell[0]}")
        for text in changes:
            raise DataError(f"{folder}: does not fit {first}: {text}.")
        left_out |= dict.fromkeys(manifest.left_out)
    for text in misleading_names(agents.values()):
        raise DataError(f"{', '.join(map(str, runs))}: cannot be merged: {text}.")
    filled = {environment.id for environment in environments.values()}
    manifest = Manifest(
        format_version=model.format_version,
        protocol=model.protocol,
        environments=list(environments.values()),
        agents=[
            dataclasses.replace(
                agent, not_played=[slug for slug in environments if (slug, name) not in results]
            )
            for name, agent in agents.items()
        ],
        left_out=[one for one in left_out if one.id not in filled],
    )
    return Run(
        manifest=manifest, tasks={slug: tasks[slug] for slug in environments}, results=results
    )


def _without_seconds(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    return [dataclasses.replace(result, seconds=None) for result in results]
