"""Join the runs of several people into one leaderboard.

Nothing in a bundle is believed: it counts once every episode in it was played again.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import EnvironmentRecord, LeftOut, Manifest
from agent_leaderboard.records.names import look_alikes
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.reference import OF_THE_MEASURE, measured_otherwise
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.verify.bundle import export_bundle
from agent_leaderboard.verify.contained import verify


def merge_bundles(
    output: Path, bundles: Sequence[Path], data: Path | None = None, *, jobs: int = 1
) -> RunFolder:
    """Verify bundles or folders and join them into one new run: the same tasks, the agents of all.

    Raises:
        DataError: If a bundle does not verify, or does not fit the first one; says why.
        ConfigurationError: If `output` is there already.
    """
    if output.exists():
        raise ConfigurationError(f"{output}: is there already; choose a new folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merge-") as scratch:
        runs = {
            bundle: _verified(bundle, Path(scratch) / f"bundle-{number}", data, jobs)
            for number, bundle in enumerate(bundles)
        }
        joined = RunFolder(Path(scratch) / "joined")
        manifest = _joined_manifest(runs)
        for run in runs.values():
            _copy_files(run, joined)
        joined.write_manifest(manifest)
        joined.write_checksums(manifest)
        joined.path.rename(output)
    return RunFolder(output)


def _verified(bundle: Path, folder: Path, data: Path | None, jobs: int) -> RunFolder:
    folder.mkdir()
    packed = bundle
    if bundle.is_dir():
        packed = folder.with_suffix(".zip")
        export_bundle(bundle, packed)
    verification = verify(packed, data, jobs=jobs, unpack_to=folder)
    if verification.problems:
        raise DataError(f"{bundle}: is refused.\n{verification.summary()}")
    if verification.not_replayed:
        missing = "; ".join(f"{slug}: {why}" for slug, why in verification.not_replayed.items())
        raise DataError(f"{bundle}: cannot be verified here: {missing}.")
    return RunFolder(folder)


def _joined_manifest(runs: Mapping[Path, RunFolder]) -> Manifest:
    """Return the manifest of all agents on all environments; they need not have played them all.

    Raises:
        DataError: If two bundles measure an environment of one name in two ways, or hold two
            agents of one name.
    """
    manifests = {bundle: run.read_manifest() for bundle, run in runs.items()}
    (first, model), *others = manifests.items()
    environments = {one.slug: one for one in model.environments}
    agents = {agent.slug: (first, agent) for agent in model.agents}
    left_out: dict[LeftOut, None] = dict.fromkeys(model.left_out)
    for bundle, manifest in others:
        for text in measured_otherwise(manifest.protocol, model.protocol, OF_THE_MEASURE):
            raise DataError(f"{bundle}: does not fit {first}: protocol: {text}.")
        for environment in manifest.environments:
            _check_same(bundle, environment, environments.setdefault(environment.slug, environment))
        for agent in manifest.agents:
            known, _ = agents.setdefault(agent.slug, (bundle, agent))
            if known != bundle and not _is_same(runs[known], runs[bundle], agent.slug):
                raise DataError(
                    f"{bundle}: its agent {agent.slug!r} is another one than that of {known}. "
                    "Give it a name of its own, and run it again."
                )
        left_out |= dict.fromkeys(manifest.left_out)
    for text in look_alikes(agent for _, agent in agents.values()):
        raise DataError(f"{', '.join(map(str, runs))}: cannot be joined: {text}.")
    played = {slug: _played(manifests.values(), slug) for slug in agents}
    records = [
        dataclasses.replace(
            agent, not_played=[slug for slug in environments if slug not in played[agent.slug]]
        )
        for _, agent in agents.values()
    ]
    filled = {environment.id for environment in environments.values()}
    return dataclasses.replace(
        model,
        environments=list(environments.values()),
        agents=records,
        left_out=[one for one in left_out if one.id not in filled],
    )


def _check_same(bundle: Path, one: EnvironmentRecord, other: EnvironmentRecord) -> None:
    """Refuse an environment that is measured otherwise; its note on contamination may differ."""
    told = dataclasses.replace(one, contamination=other.contamination)
    for text in measured_otherwise(told, other):
        name = text.replace("tasks_sha256", "task list")
        raise DataError(f"{bundle}: environment {one.slug!r}: its {name}.")


def _played(manifests: Iterable[Manifest], agent: str) -> set[str]:
    """Return the environments that an agent played in any of some runs."""
    return {
        environment.slug
        for manifest in manifests
        for environment, other in manifest.cells
        if other.slug == agent
    }


def _is_same(one: RunFolder, other: RunFolder, agent: str) -> bool:
    """Return whether an agent that is in two bundles did the same in both, such as a baseline."""
    first, second = (run.read_manifest() for run in (one, other))
    records = [dataclasses.replace(m.agent(agent), not_played=[]) for m in (first, second)]
    shared = _played([first], agent) & _played([second], agent)
    return records[0] == records[1] and all(
        file_sha256(one.results_path(slug, agent)) == file_sha256(other.results_path(slug, agent))
        for slug in shared
    )


def _copy_files(run: RunFolder, joined: RunFolder) -> None:
    for part in ("tasks", "results", "seconds"):
        for path in sorted((run.path / part).rglob("*")):
            target = joined.path / path.relative_to(run.path)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
