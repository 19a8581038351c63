"""A run as one file: a zip of its data files, and nothing else."""

import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Final

from agent_envs.data.files import atomic_path
from agent_envs.errors import DataError
from agent_leaderboard.records.reading import MAX_FILE_BYTES, file_sha256, open_plain
from agent_leaderboard.records.results import CHECKSUMS, FILES, read_checksums
from agent_leaderboard.verify.run_check import check_folder

_ZIP_ERRORS: Final = (
    OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError,
    ValueError, struct.error,
)  # fmt: skip
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of every file in a bundle: the same run gives the same bundle."""


def export_bundle(run: Path, bundle: Path) -> None:
    """Pack a complete run into a zip file.

    Raises:
        DataError: If the run is not complete, or a file does not match its checksum.
    """
    for problem in check_folder(run):
        raise DataError(f"{run}: {problem}.")
    checksums = read_checksums(run)
    with (
        atomic_path(bundle) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in FILES:
            if name != CHECKSUMS and file_sha256(run / name) != checksums.get(name):
                raise DataError(f"{run / name}: does not match checksums.json; verify the run.")
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (run / name).read_bytes())


def unpack_bundle(bundle: Path, folder: Path) -> None:
    """Unpack a stranger's bundle into an empty folder.

    Raises:
        DataError: If it does not consist of the files of a run.
    """
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
    except _ZIP_ERRORS as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{bundle}: is not a readable bundle ({error}).") from None
