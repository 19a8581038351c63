"""Merging the runs of several people: each is verified by replay first."""

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import (
    MEASURED_FIELDS,
    AgentRecord,
    LeftOut,
    Manifest,
    changed_fields,
)
from agent_leaderboard.records.names import look_alikes
from agent_leaderboard.records.results import Cell, EpisodeResult, Run, read_run, write_run
from agent_leaderboard.verify.bundle import export_bundle
from agent_leaderboard.verify.contained import verify


def merge_bundles(
    output: Path, bundles: Sequence[Path], data: Path | None = None, *, jobs: int = 1
) -> Path:
    """Verify bundles or folders, and merge them into one new run; return its folder.

    Raises:
        DataError: If a bundle does not verify, or does not fit the first one.
        ConfigurationError: If `output` exists.
    """
    if output.exists():
        raise ConfigurationError(f"{output}: exists; choose a new folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merge-") as scratch:
        runs = {
            bundle: _verified(bundle, Path(scratch) / f"bundle-{number}", data, jobs)
            for number, bundle in enumerate(bundles)
        }
        joined = Path(scratch) / "joined"
        joined.mkdir()
        write_run(joined, merge_runs(runs))
        joined.rename(output)
    return output


def _verified(bundle: Path, folder: Path, data: Path | None, jobs: int) -> Run:
    packed = bundle
    if bundle.is_dir():
        packed = folder.with_suffix(".zip")
        export_bundle(bundle, packed)
    verification = verify(packed, data, jobs=jobs, unpack_to=folder)
    if verification.problems:
        raise DataError(f"{bundle}: does not verify.\n{verification.summary()}")
    if verification.not_replayed:
        missing = "; ".join(f"{slug}: {why}" for slug, why in verification.not_replayed.items())
        raise DataError(f"{bundle}: cannot be verified here: {missing}.")
    return read_run(folder)


def merge_runs(runs: Mapping[Path, Run]) -> Run:
    """Merge the agents of several runs on all environments; they need not have run on all.

    Raises:
        DataError: If runs measure differently, or have different agents of one name.
    """
    (first, model), *_ = ((bundle, run.manifest) for bundle, run in runs.items())
    environments = {one.slug: one for one in model.environments}
    agents: dict[str, AgentRecord] = {}
    tasks = {slug: own for run in runs.values() for slug, own in run.tasks.items()}
    results: dict[Cell, Sequence[EpisodeResult]] = {}
    left_out: dict[LeftOut, None] = {}
    for bundle, run in runs.items():
        manifest = run.manifest
        for text in changed_fields(manifest.protocol, model.protocol, MEASURED_FIELDS):
            raise DataError(f"{bundle}: does not fit {first}: protocol: {text}.")
        for environment in manifest.environments:
            known = environments.setdefault(environment.slug, environment)
            same = dataclasses.replace(environment, contamination=known.contamination)
            for text in changed_fields(same, known):
                name = text.replace("tasks_sha256", "task list")
                raise DataError(f"{bundle}: environment {environment.slug!r}: its {name}.")
        for agent in manifest.agents:
            record = dataclasses.replace(agent, not_played=[])
            if agents.setdefault(agent.slug, record) != record:
                raise _other_agent(bundle, agent.slug)
        for cell, own in run.results.items():
            if _without_seconds(results.setdefault(cell, own)) != _without_seconds(own):
                raise _other_agent(bundle, cell[1])
        left_out |= dict.fromkeys(manifest.left_out)
    for text in look_alikes(agents.values()):
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
    ordered = {slug: tasks[slug] for slug in environments}
    return Run(manifest=manifest, tasks=ordered, results=results)


def _other_agent(bundle: Path, agent: str) -> DataError:
    return DataError(
        f"{bundle}: its agent {agent!r} differs from that of a bundle before it. Give it another "
        "name, and run it again."
    )


def _without_seconds(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    return [dataclasses.replace(result, seconds=None) for result in results]
