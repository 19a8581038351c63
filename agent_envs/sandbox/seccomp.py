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
from typing import Final, TypeAlias

from agent_envs.errors import SandboxUnavailableError

SHARED_OBJECT_BYTES: Final = 4 << 20
"""The largest piece of shared anonymous memory (`usage` counts with the same number)."""

_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Their numbers for audits; the tables below have a column for each, in this order."""

_ALLOWED: Final = """
    read 0 63 write 1 64 open 2 - close 3 57 stat 4 - fstat 5 80 lstat 6 - newfstatat 262 79
    statx 332 291 poll 7 - ppoll 271 73 select 23 - pselect6 270 72 lseek 8 62 pread64 17 67
    pwrite64 18 68 readv 19 65 writev 20 66 preadv 295 69 pwritev 296 70 preadv2 327 286
    pwritev2 328 287 access 21 - faccessat 269 48 faccessat2 439 439 openat 257 56 openat2 437 437
    creat 85 - pipe 22 - pipe2 293 59 dup 32 23 dup2 33 - dup3 292 24 flock 73 32 fsync 74 82
    fdatasync 75 83 truncate 76 45 ftruncate 77 46 getdents 78 - getdents64 217 61 getcwd 79 17
    chdir 80 49 fchdir 81 50 rename 82 - renameat 264 38 renameat2 316 276 mkdir 83 -
    mkdirat 258 34 rmdir 84 - link 86 - linkat 265 37 unlink 87 - unlinkat 263 35 symlink 88 -
    symlinkat 266 36 readlink 89 - readlinkat 267 78 chmod 90 - fchmod 91 52 fchmodat 268 53
    fchmodat2 452 452 chown 92 - lchown 94 - fchown 93 55 fchownat 260 54 umask 95 166 utime 132 -
    utimes 235 - utimensat 280 88 futimesat 261 - statfs 137 43 fstatfs 138 44 fallocate 285 47
    fadvise64 221 223 readahead 187 213 copy_file_range 326 285 sendfile 40 71 splice 275 76
    tee 276 77 close_range 436 436 getxattr 191 8 lgetxattr 192 9 fgetxattr 193 10
    listxattr 194 11 llistxattr 195 12 flistxattr 196 13

    mprotect 10 226 munmap 11 215 mremap 25 216 brk 12 214 madvise 28 233 mincore 27 232
    msync 26 227 mlock 149 228 mlock2 325 284 munlock 150 229 mlockall 151 230 munlockall 152 231

    execve 59 221 execveat 322 281 exit 60 93 exit_group 231 94 fork 57 - vfork 58 - wait4 61 260
    waitid 247 95 getpid 39 172 gettid 186 178 getppid 110 173 getpgid 121 155 setpgid 109 154
    getpgrp 111 - setsid 112 157 getsid 124 156 set_tid_address 218 96 set_robust_list 273 99
    futex 202 98 futex_waitv 449 449 rseq 334 293 membarrier 324 283 getuid 102 174
    geteuid 107 175 getgid 104 176 getegid 108 177 getresuid 118 148 getresgid 120 150
    getgroups 115 158 setuid 105 146 setgid 106 144 setreuid 113 145 setregid 114 143
    setresuid 117 147 setresgid 119 149 setfsuid 122 151 setfsgid 123 152 capget 125 90
    capset 126 91 sched_yield 24 124 sched_getaffinity 204 123 sched_getscheduler 145 120
    sched_getparam 143 121 sched_getattr 315 275 sched_get_priority_max 146 125
    sched_get_priority_min 147 126 sched_rr_get_interval 148 127 getcpu 309 168
    getpriority 140 141 getrlimit 97 163 setrlimit 160 164 getrusage 98 165 uname 63 160
    sysinfo 99 179 getrandom 318 278 restart_syscall 219 128 pause 34 -

    rt_sigaction 13 134 rt_sigprocmask 14 135 rt_sigreturn 15 139 rt_sigpending 127 136
    rt_sigtimedwait 128 137 rt_sigsuspend 130 133 sigaltstack 131 132 signalfd 282 -
    signalfd4 289 74 pidfd_send_signal 424 424

    clock_gettime 228 113 clock_getres 229 114 clock_nanosleep 230 115 nanosleep 35 101
    gettimeofday 96 169 time 201 - times 100 153 getitimer 36 102 setitimer 38 103 alarm 37 -
    timer_create 222 107 timer_settime 223 110 timer_gettime 224 108 timer_getoverrun 225 109
    timer_delete 226 111 timerfd_create 283 85 timerfd_settime 286 86 timerfd_gettime 287 87

    epoll_create 213 - epoll_create1 291 20 epoll_ctl 233 21 epoll_wait 232 - epoll_pwait 281 22
    epoll_pwait2 441 441 eventfd 284 - eventfd2 290 19 shutdown 48 210 getsockname 51 204
    getpeername 52 205
""".split()
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
