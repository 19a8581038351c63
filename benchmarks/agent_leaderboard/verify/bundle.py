"""A run as one file, a zip of its data files and nothing else; and merging the runs of several."""

import dataclasses
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import (
    MEASURED_FIELDS,
    AgentRecord,
    LeftOut,
    Manifest,
    differences,
)
from agent_leaderboard.records.names import look_alikes
from agent_leaderboard.records.reading import MAX_FILE_BYTES, open_plain
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

_ZIP_ERRORS: Final = (
    OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError,
    ValueError, struct.error,
)  # fmt: skip
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of every file in a bundle: the same run gives the same bundle."""


def copy_run(run: Path, folder: Path) -> None:
    """Copy the files of a complete run, and nothing else, into a new folder."""
    for problem in check_folder(run):
        raise DataError(f"{run}: {problem}.")
    if read_checksums(run) != make_checksums(run):
        raise DataError(f"{run}: a file does not match {CHECKSUMS}; verify the run.")
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(run / name, folder / name)


def export_bundle(run: Path, bundle: Path) -> None:
    """Pack a complete run into a zip file."""
    with tempfile.TemporaryDirectory() as scratch, atomic_path(bundle) as temporary:
        copy_run(run, Path(scratch) / "run")
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in FILES:
                entry = zipfile.ZipInfo(name, _DATE)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, (Path(scratch) / "run" / name).read_bytes())


def unpack_bundle(bundle: Path, folder: Path) -> None:
    """Unpack a stranger's bundle into an empty folder."""
    try:
        with open_plain(bundle) as packed, zipfile.ZipFile(packed) as archive:
            entries = archive.infolist()
            if sorted(entry.filename for entry in entries) != sorted(FILES):
                raise DataError(f"{bundle}: must contain exactly {', '.join(FILES)}.")
            for entry in entries:
                if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
                    raise DataError(f"{bundle}: {entry.filename!r} is not a regular file.")
                if entry.file_size > MAX_FILE_BYTES:
                    size = f"{MAX_FILE_BYTES:,} bytes"
                    raise DataError(f"{bundle}: {entry.filename!r} unpacks to more than {size}.")
            folder.mkdir(parents=True, exist_ok=True)
            for entry in entries:  # zipfile reads no more than the declared size
                with (folder / entry.filename).open("xb") as file:
                    file.write(archive.read(entry))
    except DataError:
        raise
    except _ZIP_ERRORS as error:
        raise DataError(f"{bundle}: is not a readable bundle ({error}).") from None


# Merging


def merge_bundles(
    output: Path,
    bundles: Sequence[Path],
    data: Path | None,
    verify: Callable[..., Verification],
    **options: Any,
) -> Path:
    """Verify bundles or folders, and merge them into one new run; return its folder."""
    if output.exists():
        raise ConfigurationError(f"{output}: exists; choose a new folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merge-") as scratch:
        runs = {}
        for number, bundle in enumerate(bundles):
            folder = Path(scratch) / f"bundle-{number}"
            if bundle.is_dir():
                copy_run(bundle, folder)
                found = verify(folder, data, **options)
            else:
                found = verify(bundle, data, unpack_to=folder, **options)
            if not found.is_whole:
                raise DataError(f"{bundle}: cannot be verified here.\n{found.summary()}")
            runs[bundle] = read_run(folder)
        joined = Path(scratch) / "joined"
        joined.mkdir()
        write_run(joined, merge_runs(runs))
        joined.rename(output)
    return output


def merge_runs(runs: Mapping[Path, Run]) -> Run:
    """Merge the agents of several runs on all environments; they need not have run on all."""
    (first, model), *_ = ((bundle, run.manifest) for bundle, run in runs.items())
    environments = {one.slug: one for one in model.environments}
    agents: dict[str, AgentRecord] = {}
    tasks = {slug: own for run in runs.values() for slug, own in run.tasks.items()}
    results: dict[Cell, Sequence[EpisodeResult]] = {}
    left_out: dict[LeftOut, None] = {}
    for bundle, run in runs.items():
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
            raise DataError(f"{bundle}: does not fit {first}: {text}.")
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
    return Run(
        manifest=manifest, tasks={slug: tasks[slug] for slug in environments}, results=results
    )


def _without_seconds(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    return [dataclasses.replace(result, seconds=None) for result in results]
