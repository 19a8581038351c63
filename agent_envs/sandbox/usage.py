"""Resource usage of a program's processes, sampled from /proc, compared with its limits.

Runs inside, in the supervisor: standard library only. Processor time is that of the program's
control group where there is one (`control_groups`); else it is sampled, so that it never decreases:
a parent that ignores SIGCHLD makes the time of its children vanish from the kernel's sums. A new
process that runs at a sample counts as if its kind had run since the sample before, as in a kernel
that counts by ticks. The times of samples are drawn ahead, or a program could hide from them.
Memory counts however it is held, which is, under the system-call filter: private and mapped pages,
once for all processes that share them, also after the first thread of a process has ended; pages in
swap; shared anonymous memory, which outlives its mappings, so each object counts as
`SHARED_OBJECT_BYTES`, the filter's maximum, or more; buffers of pipes and sockets, at their
largest; the kernel's records of mappings.
"""

import ctypes
import os
import resource
import stat
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

SHARED_OBJECT_BYTES: Final = 4 << 20
_SAMPLE_SECONDS: Final = 0.02
"""Mean time between samples."""
_COUNT_SECONDS: Final = 0.1
"""How often memory is counted exactly; resident memory is read at each sample."""
_PAGE: Final = resource.getpagesize()
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_BUFFER_BYTES: Final = {stat.S_IFIFO: 65_536, stat.S_IFSOCK: 262_144}
_MAPPING_BYTES: Final = 256
_STAT_BYTES: Final = 256
_UNSEEN_NANOSECONDS: Final = 1_000_000  # the kernel adds time at ticks
_COUNTED: Final = (b"Pss_Anon:", b"Pss_File:", b"SwapPss:")
_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine, -1)
_KCMP_VM: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class Watch:
    """Compares the usage of a program, or of one call of a session, with its limits."""

    def __init__(
        self, pids: Callable[[], Iterable[int]], limits: dict[str, Any], cpu_stat: int | None
    ) -> None:
        """Watch the processes that `pids` lists; `cpu_stat` is a descriptor of their group's."""
        self._cpu_stat = cpu_stat
        self.denied_calls: int | None = None
        self.num_answered = 0
        self._pids, self._limits = pids, limits
        self._max_bytes: int = limits["memory_mb"] << 20
        self._next_count = self._cpu = self._sampled_cpu = 0.0
        self._living: dict[tuple[int, bytes], int] = {}
        self._sampled_at = time.monotonic()
        self.begin()

    def begin(self) -> None:
        """Start the clocks."""
        self._peak_bytes = 0
        self.denied_calls = None if self.denied_calls is None else 0
        self._sample()
        self._started = time.monotonic()
        self._cpu_before = self._cpu
        self._waited = 0.0  # for a processor

    def usage(self) -> dict[str, Any]:
        """Return what was used since the beginning: fields of a `Result`."""
        maxrss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return {
            "seconds": time.monotonic() - self._started,
            "peak_memory_mb": max(self._peak_bytes, maxrss) / (1 << 20),
            "denied_calls": self.denied_calls,
        }

    @property
    def seconds_to_sample(self) -> float:
        """Time until the next sample."""
        return max(0.0, self._next_sample - time.monotonic())

    def exceeded(self) -> str:
        """Return the limit that a sample exceeds; an empty string if none, or before its time."""
        if self.seconds_to_sample > 0:
            return ""  # a program that writes output must not choose when it is sampled
        sampled_before, cpu_before = self._sampled_at, self._cpu
        num_threads, resident_bytes, is_runnable = self._sample()
        now = self._sampled_at
        cpu_seconds = self._cpu - self._cpu_before
        if is_runnable:
            self._waited += max(0.0, now - sampled_before - (self._cpu - cpu_before))
        # A program that hides processor time from samples must not gain wall-clock time by it.
        waited = self._waited if self._group_cpu() else min(self._waited, 9 * cpu_seconds)
        longest = min(self._limits["wall_seconds"] + waited, self._limits["longest_seconds"])
        if now - self._started > longest:
            return "timeout"
        if cpu_seconds > self._limits["cpu_seconds"]:
            return "cpu_limit"
        if num_threads > self._limits["processes"]:
            return "process_limit"  # root is exempt from the kernel's own limit
        if resident_bytes > self._max_bytes or now > self._next_count:
            self._next_count = now + _COUNT_SECONDS
            return "memory_limit" if self.holds_too_much() else ""
        return ""

    def holds_too_much(self) -> bool:
        """Return whether the processes hold more memory than they may."""
        held = _count_memory(self._pids())
        self._peak_bytes = max(self._peak_bytes, held)
        return held > self._max_bytes

    def _sample(self) -> tuple[int, int, bool]:
        """Read the processes; return threads, resident bytes and whether one is runnable."""
        now, reaped = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        interval, self._sampled_at = now - self._sampled_at, now
        self._next_sample = now + _SAMPLE_SECONDS * (0.5 + os.urandom(1)[0] / 256)
        ticks = num_threads = pages = 0
        living: dict[tuple[int, bytes], int] = {}
        is_runnable = False
        for pid in self._pids():
            if fields := stat_fields(pid):
                own = int(fields[11]) + int(fields[12])
                key = pid, fields[19]
                if key in self._living:
                    self._sampled_cpu += (own - self._living[key]) / _TICKS
                elif fields[0] == b"R":
                    self._sampled_cpu += interval * _running_share(pid)
                living[key] = own
                ticks += own + int(fields[13]) + int(fields[14])
                num_threads += int(fields[17])
                pages += int(fields[21])
                is_runnable |= fields[0] == b"R"
        self._living = living
        reported = reaped.ru_utime + reaped.ru_stime + ticks / _TICKS
        self._cpu = max(self._cpu, reported, self._group_cpu() or self._sampled_cpu)
        self._peak_bytes = max(self._peak_bytes, pages * _PAGE)
        return num_threads, pages * _PAGE, is_runnable

    def _group_cpu(self) -> float:
        """Return the processor time of the control group in seconds; 0 if there is none."""
        if self._cpu_stat is None:
            return 0.0
        try:
            fields = os.pread(self._cpu_stat, _STAT_BYTES, 0).split()
        except OSError:  # the host has removed it
            return 0.0
        return int(fields[1]) / 1e6 if fields[:1] == [b"usage_usec"] else 0.0


def _running_share(pid: int) -> float:
    """Return the share of its life that a new process had a processor and did not wait for one."""
    fields = _read_proc(f"/proc/{pid}/schedstat").split()
    if len(fields) < 3:
        return 1.0
    ran, waited, times = (int(field) for field in fields[:3])
    ran += _UNSEEN_NANOSECONDS
    return ran / (ran + waited) if times else 0.0


def _count_memory(pids: Iterable[int]) -> int:
    """Return the bytes that processes hold in any way, each counted once."""
    total, seen = 0, list[int]()
    shared: dict[bytes, int] = {}
    buffers: dict[tuple[int, int], int] = {}
    for pid in pids:
        thread = pid
        if stat_fields(pid)[:1] == [b"Z"]:  # one that has ended; others may live and have memory
            threads = map(int, _list(f"/proc/{pid}/task"))
            thread = next((t for t in threads if _read_proc(f"/proc/{pid}/task/{t}/maps")), pid)
        place = f"/proc/{pid}/task/{thread}"
        for name in _list(f"{place}/fd"):
            try:
                about = os.stat(f"{place}/fd/{name}")  # noqa: PTH116 - pathlib is slow
            except OSError:
                continue
            if size := _BUFFER_BYTES.get(stat.S_IFMT(about.st_mode)):
                buffers[about.st_dev, about.st_ino] = size
        maps = _read_proc(f"{place}/maps")
        if not maps or any(_libc.syscall(_KCMP, thread, t, _KCMP_VM, 0, 0) == 0 for t in seen):
            continue  # it ended, or is the child of a vfork and shares its memory
        seen.append(thread)
        _add_shared(maps, shared)
        total += maps.count(b"\n") * _MAPPING_BYTES
        for line in _read_proc(f"{place}/smaps_rollup").splitlines():
            if line.startswith(_COUNTED):
                total += int(line.split()[1]) * 1024
    return total + sum(shared.values()) + sum(buffers.values())


def _add_shared(maps: bytes, shared: dict[bytes, int]) -> None:
    """Add the shared anonymous objects of a process; each has its own inode."""
    sizes: dict[bytes, int] = {}
    for line in maps.splitlines():
        if b"/dev/zero" in line:
            area, _, _, _, inode, *_ = line.split()
            begin, end = (int(number, 16) for number in area.split(b"-"))
            sizes[inode] = sizes.get(inode, 0) + end - begin
    for inode, size in sizes.items():
        shared[inode] = max(shared.get(inode, SHARED_OBJECT_BYTES), size)


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may hold anything."""
    return _read_proc(f"/proc/{pid}/stat").rpartition(b")")[2].split()


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
