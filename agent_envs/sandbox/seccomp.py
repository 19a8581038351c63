"""The system-call filter of the strong level, as a classic BPF program.

An allowlist: what ordinary programs need for files, memory, processes, threads, pipes and time, and
for calls that can also do harm, with which arguments. Other calls fail with EPERM, or with ENOSYS
if programs then fall back to another call, or if the call is newer than these tables.

In addition to the namespaces, the filter ensures that no call can target the supervisor (process 1
of the namespace); that sockets are connected pairs of streams, which cannot be bound, addressed, or
used to pass descriptors; and that no call holds uncounted memory or uses the user's own quotas.
"""

import errno
import platform
import struct
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Final, TypeAlias

from agent_envs.errors import SandboxUnavailableError

SHARED_OBJECT_BYTES: Final = 4 << 20
"""The largest piece of shared anonymous memory (`usage` counts with the same number)."""

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Their numbers for audits; the tables have a column for each, in this order."""

_ALLOWED: Final = Path(__file__).with_name("system_calls.txt").read_text("ascii").split()
"""Calls that are allowed with all arguments: name and numbers; a dash where there is none."""

_Instruction: TypeAlias = tuple[int, int, int, int]
"""An operation, how far to jump if it holds and if not, and what it works with."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _NOTIFY = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_NEWEST_KNOWN: Final = 463
"""Calls above this number are newer than the tables, and answered as if they did not exist."""


def _one_of(argument: int, *values: int, code: int = errno.EPERM) -> list[_Instruction]:
    """Refuse all other values of the lower half, at which alone the kernel looks."""
    tests = [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_load(argument), *tests, _fail(code)]


def _not(argument: int, value: int) -> list[_Instruction]:
    return [_load(argument), (_EQUAL, 0, 1, value), _fail()]


def _no_bit(argument: int, mask: int) -> list[_Instruction]:
    return [_load(argument), (_ANY_BIT, 0, 1, mask), _fail()]


def _implies(argument: int, condition: int, bit: int) -> list[_Instruction]:
    return [_load(argument), (_ANY_BIT, 0, 2, condition), (_ANY_BIT, 1, 0, bit), _fail()]


def _null(argument: int) -> list[_Instruction]:
    upper = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4)
    return [*_one_of(argument, 0), upper, (_EQUAL, 1, 0, 0), _fail()]


def _load(argument: int) -> _Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _fail(code: int = errno.EPERM) -> _Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)


_OTHERS: Final = _not(0, 1)
"""Any process but the supervisor."""
_SMALL_IF_SHARED: Final = [
    _load(3),
    (_ANY_BIT, 0, 6, 0x20),  # MAP_ANONYMOUS
    (_ANY_BIT, 0, 5, 0x01),  # MAP_SHARED
    _load(1),
    (_AT_LEAST, 2, 0, SHARED_OBJECT_BYTES + 1),
    (_LOAD, 0, 0, _ARGUMENTS + 8 + 4),
    (_EQUAL, 1, 0, 0),
    _fail(errno.ENOMEM),
]
_PLAIN_FILE: Final = 0o060000
"""Bits that neither a file nor a pipe has in its mode."""
# Death signal, dumpable, name, seccomp?, bounding set?, timer slack, subreaper, no new privileges,
# huge pages, tagged addresses; no names for mappings, which hide what they are.
_PRCTL: Final = (1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 41, 42, 56)
_ARCH_PRCTL: Final = (0x1001, 0x1002, 0x1003, 0x1004, 0x1011, 0x1012, 0x1021, 0x1022, 0x1023)
# Duplicates, flags, record locks, the size of a pipe; no leases, owners, larger pipes.
_FCNTL: Final = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1027, 1030, 1032, 1034)
# Is it a terminal, how much is there to read, non-blocking, close on exec.
_IOCTL: Final = (
    0x5401, 0x5402, 0x5403, 0x5404, 0x540F, 0x5410, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451,
    0x802C542A,
)  # fmt: skip
# fmt: off
_GUARDED: Final[Mapping[str, tuple[int, int | None, list[_Instruction]]]] = {
    # No namespaces, tracing or sibling processes; and threads share their descriptors, or the
    # supervisor could not see what they hold.
    "clone": (56, 220, [*_no_bit(0, 0x7E02A000), *_implies(0, 0x10000, 0x400)]),
    "prctl": (157, 167, _one_of(0, *_PRCTL)),
    "arch_prctl": (158, None, _one_of(0, *_ARCH_PRCTL)),
    "fcntl": (72, 25, _one_of(1, *_FCNTL)),
    "ioctl": (16, 29, _one_of(1, *_IOCTL, code=errno.ENOTTY)),
    # No huge pages, which are not counted; shared anonymous memory in small objects only: an object
    # stays while one of its pages is mapped.
    "mmap": (9, 222, [*_no_bit(3, 0x40000), *_SMALL_IF_SHARED]),
    "prlimit64": (302, 261, _OTHERS),
    "setpriority": (141, 140, [*_one_of(0, 0, 1), *_not(1, 1)]),
    "sched_setaffinity": (203, 122, _OTHERS),
    "sched_setscheduler": (144, 119, _OTHERS),
    "sched_setparam": (142, 118, _OTHERS),
    "sched_setattr": (314, 274, _OTHERS),
    "kill": (62, 129, _OTHERS),
    "tkill": (200, 130, _OTHERS),
    "tgkill": (234, 131, [*_OTHERS, *_not(1, 1)]),
    "rt_sigqueueinfo": (129, 138, _OTHERS),
    "rt_tgsigqueueinfo": (297, 240, [*_OTHERS, *_not(1, 1)]),
    "pidfd_open": (434, 434, _OTHERS),
    # A pair of streams (AF_UNIX), close on exec or not, blocking or not.
    "socketpair": (
        53, 199, [*_one_of(0, 1), *_one_of(1, 1, 0x801, 0x80001, 0x80801), *_one_of(2, 0)]
    ),
    "sendto": (44, 206, [*_null(4), *_no_bit(3, 1)]),  # to no address, nothing out of band
    "recvfrom": (45, 207, _no_bit(3, 1)),
    # The kind and state of a socket; not who is at the other end.
    "getsockopt": (55, 209, [*_one_of(1, 1), *_one_of(2, 3, 4, 7, 8, 30, 38, 39)]),
    "mknod": (133, None, _no_bit(1, _PLAIN_FILE)),
    "mknodat": (259, 33, _no_bit(2, _PLAIN_FILE)),
    "personality": (135, 92, _one_of(0, 0, 0xFFFFFFFF)),
}
# fmt: on
"""Calls that are allowed with some arguments: their numbers, and what is tested."""

_PRETENDED: Final[Mapping[str, tuple[int, int | None, int]]] = {
    # Without its flags in a register clone3 cannot be judged; glibc falls back to clone.
    "clone3": (435, 435, errno.ENOSYS),
    "inotify_init": (253, None, errno.ENOSYS),  # a quota of the user; `tail -f` then polls
    "inotify_init1": (294, 26, errno.ENOSYS),
    "setxattr": (188, 5, errno.ENOTSUP),  # `cp -p` knows file systems without
    "lsetxattr": (189, 6, errno.ENOTSUP),
    "fsetxattr": (190, 7, errno.ENOTSUP),
    "sync": (162, 81, 0),  # everything written is in memory; the host's disks are not concerned
    "syncfs": (306, 267, 0),
}
"""Calls that are not executed and answered with something other than EPERM."""


_fail_announced: Final = (_RETURN, 0, 0, _NOTIFY)


def build_filter(machine: str = "", *, notifies: bool = False) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: As `platform.machine` names it; this machine if empty.
        notifies: Whether calls that fail with EPERM are announced to a listener, which answers.

    Raises:
        SandboxUnavailableError: If there are no tables for the processor.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SandboxUnavailableError(
            f"There is no system-call filter for {machine!r}. Use level='container', or 'limits' "
            "for code you trust."
        )
    column = list(_ARCHITECTURES).index(machine)
    allow = (_RETURN, 0, 0, _ALLOW)
    answers: dict[int | None, list[_Instruction]] = {
        int(number): [allow] for number in _ALLOWED[column + 1 :: 3] if number != "-"
    }
    answers |= {(x, arm)[column]: [_fail(code)] for x, arm, code in _PRETENDED.values()}
    answers |= {(x, arm)[column]: [*tests, allow] for x, arm, tests in _GUARDED.values()}
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),  # another convention would mean other numbers
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    refuse = [_fail()]
    for answer, run in groupby(range(_NEWEST_KNOWN + 1), lambda n: answers.get(n, refuse)):
        program += [(_AT_LEAST, len(answer), 0, list(run)[-1] + 1), *answer]
    program.append(_fail(errno.ENOSYS))  # newer calls, and x32, on x86_64
    if notifies:
        program = [_fail_announced if i == _fail() else i for i in program]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
