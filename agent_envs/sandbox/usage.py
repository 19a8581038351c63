"""What a program takes at this moment: processor time, processes, memory; as /proc tells it.

Runs inside, in the supervisor: standard library only. Memory is counted whichever way it is held.
Where no control group does that for us, these are the ways that the system-call filter leaves:
private and mapped pages, once for all who share them, also when the first thread of a process has
ended; pages in swap; shared anonymous memory, which stays when the part of it that was mapped is
gone, so each object counts as `SHARED_OBJECT_BYTES`, the most that the filter lets it be, or more;
what waits in pipes and sockets, at its most; and the kernel's own records of mappings.
"""

import ctypes
import os
import resource
import stat
from collections.abc import Iterator
from typing import Final, NamedTuple

SHARED_OBJECT_BYTES: Final = 4 << 20
_PAGE: Final = resource.getpagesize()
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_BUFFER_BYTES: Final = {stat.S_IFIFO: 65_536, stat.S_IFSOCK: 262_144}
_MAPPING_BYTES: Final = 256
_COUNTED: Final = (b"Pss_Anon:", b"Pss_File:", b"SwapPss:")
_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine, -1)
_SAME_MEMORY: Final = 1  # KCMP_VM

_libc = ctypes.CDLL(None, use_errno=True)


class Sample(NamedTuple):
    """What one look at a program's processes found."""

    cpu_seconds: float
    """Processor time of those that live, and of those that they, or we, have waited for."""
    num_threads: int
    resident_bytes: int
    """What is in memory, counted anew for each process that shares it; nothing hidden."""
    is_runnable: bool
    """Whether one of them has a processor or waits for one."""


def take_sample(pids: Iterator[int]) -> Sample:
    """Look at processes, quickly."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = num_threads = pages = 0
    is_runnable = False
    for pid in pids:
        if fields := stat_fields(pid):
            ticks += sum(int(field) for field in fields[11:15])
            num_threads += int(fields[17])
            pages += int(fields[21])
            is_runnable |= fields[0] == b"R"
    seconds = reaped.ru_utime + reaped.ru_stime + ticks / _TICKS
    return Sample(seconds, num_threads, pages * _PAGE, is_runnable)


def count_memory(pids: Iterator[int]) -> int:
    """Return the bytes that processes hold, in whichever way, each counted once."""
    total, seen = 0, list[int]()
    shared: dict[bytes, int] = {}
    buffers: dict[tuple[int, int], int] = {}
    for pid in pids:
        thread = _living_thread(pid)
        place = f"/proc/{pid}/task/{thread}"
        _add_buffers(place, buffers)
        maps = _read_proc(f"{place}/maps")
        if not maps or any(_share_memory(thread, other) for other in seen):
            continue  # it ended, or is the child of a vfork
        seen.append(thread)
        _add_shared(maps, shared)
        total += maps.count(b"\n") * _MAPPING_BYTES
        for line in _read_proc(f"{place}/smaps_rollup").splitlines():
            if line.startswith(_COUNTED):
                total += int(line.split()[1]) * 1024
    return total + sum(shared.values()) + sum(buffers.values())


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may hold anything."""
    return _read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _living_thread(pid: int) -> int:
    """Return the first thread of a process, or if that has ended, one that lives: it has memory."""
    if stat_fields(pid)[:1] == [b"Z"]:
        for name in _list(f"/proc/{pid}/task"):
            if _read_proc(f"/proc/{pid}/task/{name}/maps"):
                return int(name)
    return pid


def _share_memory(thread: int, other: int) -> bool:
    """Return whether two threads share their memory; all that have ended would seem to."""
    return bool(_libc.syscall(_KCMP, thread, other, _SAME_MEMORY, 0, 0) == 0)


def _add_shared(maps: bytes, shared: dict[bytes, int]) -> None:
    """Add the shared anonymous objects of a process: each a file of its own, without a name."""
    if b"/dev/zero" not in maps:
        return
    sizes: dict[bytes, int] = {}
    for line in maps.splitlines():
        if b"/dev/zero" in line:
            area, _, _, _, inode, *_ = line.split()
            begin, end = (int(number, 16) for number in area.split(b"-"))
            sizes[inode] = sizes.get(inode, 0) + end - begin
    for inode, size in sizes.items():
        shared[inode] = max(shared.get(inode, SHARED_OBJECT_BYTES), size)


def _add_buffers(place: str, buffers: dict[tuple[int, int], int]) -> None:
    """Add the pipes, with a name or without, and the sockets of a process to `buffers`."""
    for name in _list(f"{place}/fd"):
        try:
            about = os.stat(f"{place}/fd/{name}")  # noqa: PTH116 - pathlib is slow
        except OSError:
            continue
        if size := _BUFFER_BYTES.get(stat.S_IFMT(about.st_mode)):
            buffers[about.st_dev, about.st_ino] = size


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _read_proc(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""  # it ended meanwhile
