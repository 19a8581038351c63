"""Control groups (version 2) of programs: exact processor time, and one kill for all processes.

They need no controller and no daemon, but a hierarchy in which this user may create groups: root's,
or one that systemd or a container engine delegated. Elsewhere processes are sampled (`usage`).
"""

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_REMOVE_SECONDS: Final = 2.0


class ControlGroup:
    """A new control group next to this process; without effect where none can be created."""

    def __init__(self) -> None:
        """Create the group."""
        self._folder: Path | None = None
        self.descriptors: Sequence[int] = ()
        """Of ``cgroup.procs``, for writing, and of ``cpu.stat``; for a supervisor."""
        with contextlib.suppress(OSError, StopIteration):
            folder = _own_folder() / f"agent-envs-{os.getpid()}-{uuid.uuid4().hex}"
            folder.mkdir()
            self._folder = folder
            stat = os.open(folder / "cpu.stat", os.O_RDONLY | os.O_CLOEXEC)
            try:
                processes = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            except OSError:
                os.close(stat)
                raise
            self.descriptors = (processes, stat)

    def close(self) -> None:
        """Close our descriptors, once the supervisor has them."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def remove(self) -> None:
        """Kill what is still in the group, and remove it."""
        self.close()
        deadline = time.monotonic() + _REMOVE_SECONDS
        while self._folder is not None:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                pass
            except OSError:
                with contextlib.suppress(OSError):
                    (self._folder / "cgroup.kill").write_text("1")
                if time.monotonic() < deadline:
                    time.sleep(0.005)
                    continue
            self._folder = None


@functools.cache
def _own_folder() -> Path:
    """Return the folder of this process's control group; raise StopIteration if there is none.

    Empty groups in it of processes that were killed are removed.
    """
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    path = next(line[3:] for line in groups if line.startswith("0::"))
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    root, place = next(
        (fields[3], fields[4]) for fields in mounts if fields[fields.index("-") + 1] == "cgroup2"
    )
    folder = Path(place) / os.path.relpath(path, root)
    for group in folder.glob("agent-envs-*-*"):
        if not Path("/proc", group.name.split("-")[2]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
    return folder
