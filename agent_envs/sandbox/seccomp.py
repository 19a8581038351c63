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

_X86_64: Final = (
    0xC000003E,
    """
    socket 41 connect 42 accept 43 accept4 288 bind 49 listen 50
    shmget 29 shmat 30 shmctl 31 shmdt 67 semget 64 semop 65 semctl 66 semtimedop 220
    msgget 68 msgsnd 69 msgrcv 70 msgctl 71 mq_open 240 mq_unlink 241 mq_timedsend 242
    mq_timedreceive 243 mq_notify 244 mq_getsetattr 245
    ptrace 101 process_vm_readv 310 process_vm_writev 311 process_madvise 440 kcmp 312
    pidfd_getfd 438 mount 165 umount2 166 pivot_root 155 chroot 161 move_mount 429 open_tree 428
    fsopen 430 fsconfig 431 fsmount 432 fspick 433 mount_setattr 442 open_tree_attr 467
    statmount 457 listmount 458 unshare 272 setns 308
    add_key 248 request_key 249 keyctl 250 bpf 321 perf_event_open 298 userfaultfd 323
    io_uring_setup 425 io_uring_enter 426 io_uring_register 427 io_setup 206
    memfd_create 319 memfd_secret 447 vmsplice 278 fanotify_init 300 fanotify_mark 301
    open_by_handle_at 304 name_to_handle_at 303 init_module 175 finit_module 313
    delete_module 176 kexec_load 246 kexec_file_load 320 reboot 169 swapon 167 swapoff 168
    syslog 103 acct 163 quotactl 179 quotactl_fd 443 settimeofday 164 adjtimex 159
    clock_settime 227 clock_adjtime 305 sethostname 170 setdomainname 171 iopl 172 ioperm 173
    modify_ldt 154 uselib 134 ustat 136 sysfs 139 personality 135 vhangup 153 nfsservctl 180
    lookup_dcookie 212 move_pages 279 migrate_pages 256 mbind 237 set_mempolicy 238
    get_mempolicy 239 landlock_create_ruleset 444 seccomp 317
""",
    56,
    435,
)
_AARCH64: Final = (
    0xC00000B7,
    """
    socket 198 bind 200 listen 201 accept 202 connect 203 accept4 242
    shmget 194 shmctl 195 shmat 196 shmdt 197 semget 190 semctl 191 semtimedop 192 semop 193
    msgget 186 msgctl 187 msgrcv 188 msgsnd 189 mq_open 180 mq_unlink 181 mq_timedsend 182
    mq_timedreceive 183 mq_notify 184 mq_getsetattr 185
    ptrace 117 process_vm_readv 270 process_vm_writev 271 process_madvise 440 kcmp 272
    pidfd_getfd 438 mount 40 umount2 39 pivot_root 41 chroot 51 move_mount 429 open_tree 428
    fsopen 430 fsconfig 431 fsmount 432 fspick 433 mount_setattr 442 open_tree_attr 467
    statmount 457 listmount 458 unshare 97 setns 268
    add_key 217 request_key 218 keyctl 219 bpf 280 perf_event_open 241 userfaultfd 282
    io_uring_setup 425 io_uring_enter 426 io_uring_register 427 io_setup 0
    memfd_create 279 memfd_secret 447 vmsplice 75 fanotify_init 262 fanotify_mark 263
    open_by_handle_at 265 name_to_handle_at 264 init_module 105 finit_module 273
    delete_module 106 kexec_load 104 kexec_file_load 294 reboot 142 swapon 224 swapoff 225
    syslog 116 acct 89 quotactl 60 quotactl_fd 443 settimeofday 170 adjtimex 171
    clock_settime 112 clock_adjtime 266 sethostname 161 setdomainname 162
    personality 92 vhangup 58 nfsservctl 42 lookup_dcookie 18 move_pages 239
    migrate_pages 238 mbind 235 set_mempolicy 237 get_mempolicy 236
    landlock_create_ruleset 444 seccomp 277
""",
    220,
    435,
)
_TABLES: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}

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
    if machine not in _TABLES:
        raise SandboxUnavailableError(
            f"The sandbox knows no system-call filter for {machine!r} (known: "
            f"{', '.join(_TABLES)}). Use level='container', or level='limits' for code you trust."
        )
    architecture, table, clone, clone3 = _TABLES[machine]
    numbers = [int(word) for word in table.split() if word.isdigit()]
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
