"""The system-call filter, run here instruction by instruction, for both processors."""

import errno
import struct
from functools import cache

import pytest

from agent_envs.sandbox import seccomp
from agent_envs.sandbox.seccomp import _ALLOWED, _ARCHITECTURES, _GUARDED, _PRETENDED, build_filter

MACHINES = list(_ARCHITECTURES)
ALLOWED, KILLED = "allowed", "killed"


@cache
def instructions(machine):
    code = build_filter(machine)
    return [struct.unpack_from("HBBI", code, i) for i in range(0, len(code), 8)]


def judge(machine, number, *arguments, architecture=None):
    """Return what the filter says: allowed, killed, or the error number."""
    program = instructions(machine)
    assert len(program) <= 4096
    values = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack(
        "<IIQ6Q", number, architecture or _ARCHITECTURES[machine], 0, *(v % 2**64 for v in values)
    )
    place = accumulator = 0
    while True:
        operation, if_true, if_false, value = program[place]
        place += 1
        if operation == seccomp._LOAD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif operation == seccomp._RETURN:
            if value == seccomp._ALLOW:
                return ALLOWED
            return KILLED if value == seccomp._KILL else value & 0xFFFF
        else:
            holds = {
                seccomp._EQUAL: accumulator == value,
                seccomp._AT_LEAST: accumulator >= value,
                seccomp._ANY_BIT: bool(accumulator & value),
            }[operation]
            place += if_true if holds else if_false


def number_of(machine, name):
    column = MACHINES.index(machine)
    if name in _GUARDED:
        return _GUARDED[name][column]
    return int(_ALLOWED[_ALLOWED.index(name) + 1 + column])


@pytest.mark.parametrize("machine", MACHINES)
def test_only_what_is_listed_is_allowed_with_any_arguments(machine):
    column = MACHINES.index(machine)
    free = {int(n) for n in _ALLOWED[column + 1 :: 3] if n != "-"}
    known = free | {row[column] for row in (*_GUARDED.values(), *_PRETENDED.values())}
    for number in range(480):
        for filler in (0, 2**64 - 1):
            said = judge(machine, number, *[filler] * 6)
            if number in free:
                assert said == ALLOWED
            elif number not in known:
                assert said == (errno.EPERM if number < 464 else errno.ENOSYS)
    assert judge(machine, 1, architecture=0x40000003) == KILLED  # i386 has other numbers
    assert judge(machine, 0x40000000 + 1) == errno.ENOSYS  # x32


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("prlimit64", (1, 7)),
        ("setpriority", (0, 1)),
        ("setpriority", (2, 65534)),
        *[(f"sched_set{what}", (1,)) for what in ("affinity", "scheduler", "param", "attr")],
        ("kill", (1, 9)),
        ("tkill", (1, 9)),
        ("tgkill", (1, 1, 9)),
        ("tgkill", (5, 1, 9)),
        ("rt_sigqueueinfo", (1, 9)),
        ("rt_tgsigqueueinfo", (1, 1, 9)),
        ("pidfd_open", (1,)),
        ("kill", ((1 << 32) | 1, 9)),  # the kernel looks at the lower half
        *[("socketpair", (family, 1, 0)) for family in range(46) if family != 1],
        ("socketpair", (1, 2, 0)),
        ("socketpair", (1, 5, 0)),
        ("socketpair", (1, 1, 1)),
        ("sendto", (3, 1, 1, 0, 0x7000)),
        ("sendto", (3, 1, 1, 0, 1 << 40)),
        ("sendto", (3, 1, 1, 1, 0)),
        ("recvfrom", (3, 1, 1, 1)),
        ("getsockopt", (3, 1, 17)),  # who is at the other end
        *[("clone", (1 << bit,)) for bit in (13, 15, 17, 25, 26, 27, 28, 29, 30)],
        ("clone", (0x10000 | 0x900,)),  # a thread with descriptors of its own
        ("fcntl", (3, 1031, 1 << 20)),  # a larger pipe
        ("fcntl", (3, 1024)),  # a lease
        ("fcntl", (3, 8)),  # an owner, who gets signals
        ("mmap", (0, 4096, 3, 0x40022)),
        ("mmap", (0, (4 << 20) + 1, 3, 0x21)),
        ("mmap", (0, 1 << 32, 3, 0x23)),
        ("mknodat", (0, 0, 0o020600)),
        ("mknodat", (0, 0, 0o140600)),
        *[("prctl", (option,)) for option in (22, 35, 53, 59, 62, 0x59616D61, 0x53564D41)],
        ("personality", (0x40000,)),
    ],
)
def test_a_call_is_refused_with_arguments_that_do_harm(machine, call, arguments):
    assert judge(machine, number_of(machine, call), *arguments) in (errno.EPERM, errno.ENOMEM)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("prlimit64", (0, 7)),
        ("kill", (-1, 9)),
        ("kill", (7, 9)),
        ("clone", (0x3D0F00,)),  # pthread_create
        ("clone", (0x1200011,)),  # fork
        ("clone", (0x4111,)),  # posix_spawn
        ("socketpair", (1, 0x80001, 0)),
        ("sendto", (3, 1 << 40, 1, 0x4000, 0)),
        ("mmap", (0, 1 << 30, 3, 0x22)),
        ("mmap", (0, 1 << 30, 3, 0x01)),  # a file
        ("mmap", (0, 4 << 20, 3, 0x21)),
        ("mknodat", (0, 0, 0o010600)),
        ("fcntl", (3, 1030)),
        ("ioctl", (0, 0x5401)),
        ("prctl", (15,)),
    ],
)
def test_what_ordinary_programs_do_is_allowed(machine, call, arguments):
    assert judge(machine, number_of(machine, call), *arguments) == ALLOWED
