"""Share a run as one file: a zip of its folder, of which only files of a run are unpacked."""

import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent_envs.data.files import atomic_path
from agent_envs.errors import DataError
from agent_leaderboard.records.reading import MAX_FILE_BYTES, file_sha256, open_plain
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.verify.folder_check import MAX_BYTES, MAX_FILES, check_tree

_NAME: Final = "[a-z0-9][a-z0-9._-]*"
_FILE: Final = re.compile(
    rf"manifest\.json|checksums\.json|tasks/{_NAME}\.json|(?:results|seconds)/{_NAME}/{_NAME}\.jsonl"
)
_OTHERS: Final = (NotImplementedError, RuntimeError, EOFError, ValueError, struct.error)
"""What `zipfile` raises besides, of archives that are damaged, encrypted or of another kind."""
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Of every file in a bundle: the same run gives the same bundle."""


def export_bundle(run: Path, bundle: Path) -> None:
    """Pack a run that is complete into a zip file.

    Raises:
        DataError: If the run is not complete, holds a link, or a file is not what its checksum
            says.
    """
    for problem in check_tree(run):
        raise DataError(f"{run}: {problem}.")
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
        with open_plain(bundle) as packed, zipfile.ZipFile(packed) as archive:
            entries = archive.infolist()
            _check_entries(bundle, entries)
            for entry in entries:
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                # zipfile reads no more than file_size, and checks it against what it unpacks
                with archive.open(entry) as source, target.open("xb") as file:
                    shutil.copyfileobj(source, file)
    except (OSError, zipfile.BadZipFile, zlib.error, *_OTHERS) as error:
        raise DataError(f"{bundle}: is no bundle that can be read ({error}).") from None
    return RunFolder(folder)


def _check_entries(bundle: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Refuse what is no file of a run, before anything is unpacked."""
    if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise DataError(
            f"{bundle}: holds more than {MAX_FILES:,} files, or unpacks to more than "
            f"{MAX_BYTES:,} bytes."
        )
    times = Counter(entry.filename for entry in entries)
    for entry in entries:
        name, mode = entry.filename, entry.external_attr >> 16
        is_plain = stat.S_IFMT(mode) in (0, stat.S_IFREG)
        if _FILE.fullmatch(name) is None or times[name] > 1 or not is_plain:
            raise DataError(f"{bundle}: {name!r} is no file of a run, or is there twice.")
        if entry.file_size > MAX_FILE_BYTES:
            raise DataError(f"{bundle}: {name!r} unpacks to more than {MAX_FILE_BYTES:,} bytes.")
