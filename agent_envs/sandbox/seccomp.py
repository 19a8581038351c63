"""The system-call filter of the strong level, as a classic BPF program.

It refuses what the namespaces leave open: sockets, new namespaces and mounts, other processes'
memory, System V and POSIX IPC, keys, kernel modules, tracing, and every call newer than this
table. What is left is what ordinary programs use: files, memory, processes, threads, pipes.
"""

import errno
import platform
import struct
from typing import Final

from agent_envs.errors import SandboxUnavailableError

_MACHINES: Final = {  # its number for audits, and those of clone and clone3
    "x86_64": (0xC000003E, 56, 435),
    "aarch64": (0xC00000B7, 220, 435),
}
_REFUSED: Final = """
    socket 41 198 connect 42 203 accept 43 202 accept4 288 242 bind 49 200 listen 50 201
    shmget 29 194 shmat 30 196 shmctl 31 195 shmdt 67 197 semget 64 190 semop 65 193
    semctl 66 191 semtimedop 220 192 msgget 68 186 msgsnd 69 189 msgrcv 70 188 msgctl 71 187
    mq_open 240 180 mq_unlink 241 181 mq_timedsend 242 182 mq_timedreceive 243 183
    mq_notify 244 184 mq_getsetattr 245 185 ptrace 101 117 process_vm_readv 310 270
    process_vm_writev 311 271 process_madvise 440 440 kcmp 312 272 pidfd_getfd 438 438
    mount 165 40 umount2 166 39 pivot_root 155 41 chroot 161 51 move_mount 429 429
    open_tree 428 428 fsopen 430 430 fsconfig 431 431 fsmount 432 432 fspick 433 433
    mount_setattr 442 442 open_tree_attr 467 467 statmount 457 457 listmount 458 458
    unshare 272 97 setns 308 268 add_key 248 217 request_key 249 218 keyctl 250 219 bpf 321 280
    perf_event_open 298 241 userfaultfd 323 282 io_uring_setup 425 425 io_uring_enter 426 426
    io_uring_register 427 427 io_setup 206 0 memfd_create 319 279 memfd_secret 447 447
    vmsplice 278 75 fanotify_init 300 262 fanotify_mark 301 263 open_by_handle_at 304 265
    name_to_handle_at 303 264 init_module 175 105 finit_module 313 273 delete_module 176 106
    kexec_load 246 104 kexec_file_load 320 294 reboot 169 142 swapon 167 224 swapoff 168 225
    syslog 103 116 acct 163 89 quotactl 179 60 quotactl_fd 443 443 settimeofday 164 170
    adjtimex 159 171 clock_settime 227 112 clock_adjtime 305 266 sethostname 170 161
    setdomainname 171 162 iopl 172 - ioperm 173 - modify_ldt 154 - uselib 134 - ustat 136 -
    sysfs 139 - personality 135 92 vhangup 153 58 nfsservctl 180 42 lookup_dcookie 212 18
    move_pages 279 239 migrate_pages 256 238 mbind 237 235 set_mempolicy 238 237
    get_mempolicy 239 236 landlock_create_ruleset 444 444 seccomp 317 277
""".split()
"""Calls: name, number on x86_64, number on aarch64; a dash where there is none."""

_NEWEST_KNOWN: Final = 463
"""Calls above this number are newer than the table: they do not exist, as far as we say."""
# CLONE_NEWTIME shares its bit with the exit signal of clone() and cannot be asked for there.
_CLONE_NAMESPACES: Final = 0x7E020000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


def build_filter(machine: str = "") -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: As `platform.machine` names it; this machine if empty.

    Raises:
        SandboxUnavailableError: If the processor's system calls are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _MACHINES:
        raise SandboxUnavailableError(
            f"The sandbox knows no system-call filter for {machine!r} (known: "
            f"{', '.join(_MACHINES)}). Use level='container', or level='limits' for code you trust."
        )
    architecture, clone, clone3 = _MACHINES[machine]
    column = list(_MACHINES).index(machine) + 1
    numbers = [int(number) for number in _REFUSED[column::3] if number != "-"]
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),  # another calling convention would mean other numbers
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # Without its flags in a register clone3 cannot be judged; glibc falls back to clone.
        *_refuse(_EQUAL, clone3, errno.ENOSYS),
    ]
    for number in numbers:
        program += _refuse(_EQUAL, number, errno.EPERM)
    program += _refuse(_AT_LEAST, _NEWEST_KNOWN + 1, errno.ENOSYS)  # and x32, on x86_64
    program += [
        (_EQUAL, 0, 2, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 1, 0, _CLONE_NAMESPACES),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _refuse(test: int, number: int, code: int) -> list[tuple[int, int, int, int]]:
    return [(test, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)]
