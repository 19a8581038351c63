"""Share a run as one file, and join the runs of several people into one leaderboard.

A bundle is a zip of a run's folder. Nothing in it is believed: only files that a run consists of
are unpacked, and a bundle counts once every episode in it was played again.
"""

import dataclasses
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import LeftOut, Manifest
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.verify.verify import verify

MAX_BYTES: Final = 4 * 2**30
"""What a bundle may unpack to."""
_NAME: Final = "[a-z0-9][a-z0-9._-]*"
_FILE: Final = re.compile(
    rf"manifest\.json|checksums\.json|tasks/{_NAME}\.json|(?:results|seconds)/{_NAME}/{_NAME}\.jsonl"
)
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Of every file in a bundle: the same run gives the same bundle."""


def export_bundle(run: Path, bundle: Path) -> None:
    """Pack a run that is complete into a zip file.

    Raises:
        DataError: If the run is not complete, or a file is not what its checksum says.
    """
    folder = RunFolder(run)
    manifest = folder.read_manifest()
    checksums = folder.read_checksums()
    names = folder.expected_files(manifest)
    for name in names:
        if file_sha256(run / name) != checksums.get(name):
            raise DataError(f"{run / name}: is not what checksums.json says; verify the run.")
    seconds = [folder.seconds_path(e.slug, a.slug) for e, a in manifest.cells]
    names += [path.relative_to(run).as_posix() for path in seconds if path.exists()]
    with (
        atomic_path(bundle) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in sorted([*names, "checksums.json"]):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (run / name).read_bytes())


def unpack_bundle(bundle: Path, folder: Path) -> RunFolder:
    """Unpack a bundle of others into an empty folder.

    Raises:
        DataError: If it is no bundle, or holds anything that is no file of a run.
    """
    try:
        with zipfile.ZipFile(bundle) as archive:
            entries, names = archive.infolist(), archive.namelist()
            if sum(entry.file_size for entry in entries) > MAX_BYTES:
                raise DataError(f"{bundle}: unpacks to more than {MAX_BYTES:,} bytes.")
            for entry, name in zip(entries, names, strict=True):
                if _FILE.fullmatch(name) is None or names.count(name) > 1:
                    raise DataError(f"{bundle}: {name!r} is no file of a run, or is there twice.")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                # zipfile reads no more than file_size, and checks it against what it unpacks
                with archive.open(entry) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise DataError(f"{bundle}: is no bundle that can be read ({error}).") from None
    return RunFolder(folder)


def merge_bundles(
    output: Path, bundles: Sequence[Path], data: Path | None = None, *, jobs: int = 1
) -> RunFolder:
    """Verify bundles and join them into one new run: the same tasks, the agents of all.

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
    run = unpack_bundle(bundle, folder)
    verification = verify(run.path, data, jobs=jobs)
    if verification.problems:
        shown = verification.summary().replace(f"{folder}/", "")
        raise DataError(f"{bundle}: is refused.\n{shown}")
    if verification.not_replayed:
        missing = "; ".join(f"{slug}: {why}" for slug, why in verification.not_replayed.items())
        raise DataError(f"{bundle}: cannot be verified here: {missing}.")
    return run


def _joined_manifest(runs: Mapping[Path, RunFolder]) -> Manifest:
    """Return the manifest of all agents, and see that the bundles measure the same."""
    manifests = {bundle: run.read_manifest() for bundle, run in runs.items()}
    (first, model), *others = manifests.items()
    agents = {agent.slug: (first, agent) for agent in model.agents}
    left_out: dict[LeftOut, None] = dict.fromkeys(model.left_out)
    for bundle, manifest in others:
        for text in _differences(model, manifest):
            raise DataError(f"{bundle}: does not fit {first}: {text}.")
        for agent in manifest.agents:
            known, _ = agents.setdefault(agent.slug, (bundle, agent))
            if known != bundle and not _is_same(runs[known], runs[bundle], agent.slug):
                raise DataError(
                    f"{bundle}: its agent {agent.slug!r} is another one than that of {known}. "
                    "Give it a name of its own, and run it again."
                )
        left_out |= dict.fromkeys(manifest.left_out)
    records = [agent for _, agent in agents.values()]
    return dataclasses.replace(model, agents=records, left_out=list(left_out))


def _is_same(one: RunFolder, other: RunFolder, agent: str) -> bool:
    """Return whether an agent that is in two bundles did the same in both, such as a baseline."""
    first, second = (run.read_manifest().agent(agent) for run in (one, other))
    paths = [
        (run.results_path(environment.slug, agent) for run in (one, other))
        for environment in one.read_manifest().environments
    ]
    return first == second and all(file_sha256(a) == file_sha256(b) for a, b in paths)


def _differences(one: Manifest, other: Manifest) -> Iterator[str]:
    """Yield what two runs measure differently."""
    for name in _changed(one.protocol, other.protocol):
        a, b = (getattr(manifest.protocol, name) for manifest in (one, other))
        yield f"protocol: {name} is {b!r}, not {a!r}"
    slugs, others = ({e.slug for e in manifest.environments} for manifest in (one, other))
    for slug in sorted(slugs ^ others):
        yield f"environment {slug!r} is in one of them only"
    for slug in sorted(slugs & others):
        for name in _changed(one.environment(slug), other.environment(slug)):
            what = "task list" if name == "tasks_sha256" else name
            yield f"environment {slug!r}: its {what} is another one"


def _changed(one: Any, other: Any) -> list[str]:
    """Return the fields in which two records of a kind differ."""
    names = [field.name for field in dataclasses.fields(one)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _copy_files(run: RunFolder, joined: RunFolder) -> None:
    for part in ("tasks", "results", "seconds"):
        for path in sorted((run.path / part).rglob("*")):
            target = joined.path / path.relative_to(run.path)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
