"""The strong level, inside: a small isolated Python that forks once per program.

`main` leaves the host's namespaces, builds a read-only file tree of Python and the system's
programs, and serves. Each request comes as a file descriptor over a socket; a fork with its own
namespaces and an empty scratch directory supervises the program. Standard library only.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Final, NoReturn

from agent_envs.sandbox import supervisor

_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET, _NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_BIND, _REC, _PRIVATE, _DETACH = 4096, 16384, 1 << 18, 2
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100
_OWN_NAMESPACES: Final = _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
"""Namespaces that each program has for itself."""
_MACHINE: Final = os.uname().machine
_CLONE: Final = {"x86_64": 56, "aarch64": 220}
_MOUNT_SETATTR: Final = 442  # the same number on every processor
_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3: Final = 0x20080522
_SET_DUMPABLE, _SET_NO_NEW_PRIVS = 4, 38
_SECCOMP: Final = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store")
_SETTINGS: Final = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
# As programs see it -> the host's; /dev/full gives zeros, and is no shared memory when mapped.
_DEVICES: Final = {
    "null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom",
}  # fmt: skip
_MASKED: Final = (
    "lib*/*/*-packages", "local/lib*/*/*-packages", "src", "local/src", "envs", "pkgs",
)  # fmt: skip
"""Folders below a prefix that are not Python's own; the user's projects may be there."""
_LINKS: Final = {
    **dict.fromkeys(("/tmp", "/var/tmp", "/dev/shm"), "/scratch"),  # noqa: S108
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_FILES: Final = {
    "/etc/passwd": "nobody:x:65534:65534:nobody:/scratch:/bin/sh\n",
    "/etc/group": "nogroup:x:65534:\n",
}
_WARM_MODULES: Final = (
    "collections bisect copy datetime functools heapq itertools json math operator random re "
    "string tarfile typing"
).split()
"""Imported once, before the forks."""
UID: Final = 65_534
"""User of programs: "nobody", inside and (if the host's process is root) outside."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None)


def main(config: dict[str, Any]) -> None:
    """Enter the namespaces and serve requests until the host closes its end."""
    is_root = _leave_namespaces()
    first = os.fork()
    if first:
        # Until the namespace's first process is gone, and with it all others.
        os.close(0)
        os.waitpid(first, 0)
        os._exit(0)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _libc.sethostname(b"sandbox", 7)
        _build_root(config["home"])
        if is_root:  # who is exempt from the limit on processes, and owns the host's files
            os.setgroups([])
            os.setresgid(UID, UID, UID)
            os.setresuid(UID, UID, UID)
            _check(_libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0))  # or /proc/self would still be root's
        os.chdir("/")
        for name in _WARM_MODULES:
            __import__(name)
        _serve(socket.socket(fileno=0), [bytes.fromhex(code) for code in config["seccomp"]])
    except BaseException as error:  # noqa: BLE001 - the host reads it and raises
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(1)


def _leave_namespaces() -> bool:
    """Leave the host's namespaces; return whether as root, who can become another user.

    Root without CAP_SYS_ADMIN, or in a user namespace with a single user, creates a user namespace
    first, as any other user does.
    """
    flags = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    uid, gid = os.geteuid(), os.getegid()
    may_set_groups = Path("/proc/self/setgroups").read_text().strip() == "allow"
    may_change = uid == 0 and _has_id("uid") and _has_id("gid") and may_set_groups
    if may_change and _libc.unshare(flags) == 0:
        return True
    _check(_libc.unshare(flags | _NEWUSER), "unshare: user namespaces")
    _map_ids(uid, gid)
    return False


def _has_id(kind: str) -> bool:
    """Return whether `UID` exists in this user namespace."""
    lines = Path(f"/proc/self/{kind}_map").read_text().splitlines()
    ranges = (map(int, line.split()) for line in lines)
    return any(first <= UID < first + count for first, _, count in ranges)


def _serve(host: socket.socket, codes: list[bytes]) -> NoReturn:
    """Fork a supervisor and its program for each request, until the host closes its end."""
    ids = os.geteuid(), os.getegid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    gc.collect()
    gc.freeze()  # what is here already is shared with the forks, unless touched
    host.send(b"r")  # ready
    while True:
        message, descriptors, _, _ = socket.recv_fds(host, 1, 3)
        if not message:
            os._exit(0)
        if _fork_into(_OWN_NAMESPACES) == 0:
            host.close()
            control, *group = descriptors
            _enter(control, group, ids, codes)
        for descriptor in descriptors:  # if the fork failed, the host sees its end
            os.close(descriptor)


def _enter(control: int, group: list[int], ids: tuple[int, int], codes: list[bytes]) -> NoReturn:
    """Be the first process in the namespaces of one program."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _map_ids(*ids)
        request = supervisor.receive_request(control)
        hidden = "hidepid=ptraceable,subset=pid"
        _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, hidden)
        size = f"size={request['limits']['scratch_mb']}m,nr_inodes=4096,mode=700"
        _mount("scratch", "/scratch", "tmpfs", _NOSUID | _NODEV, size)
        os.chdir("/scratch")
        if os.getpid() != 1:  # or a signal to all would reach the user's processes
            raise RuntimeError("not the first process of a namespace")
        supervisor.supervise(request, control, control, lambda: _confine(codes), group)
    except BaseException as error:  # noqa: BLE001 - reported to the host
        failure = json.dumps({"failure": f"{type(error).__name__}: {error}"})
        supervisor.send_frame(control, b"r", failure.encode())
    finally:
        os._exit(0)


def _confine(codes: list[bytes]) -> int:
    """Give up every right for good, also the right to lower ``oom_score_adj``.

    Install the first of two filters, whose denied calls are announced, and return the listener; or
    the second, and return -1, where a filter around this process has a listener already.
    """
    _check(_libc.unshare(_NEWCGROUP), "unshare: cgroup namespace")  # the host's path is hidden
    _set_attributes("/proc", _RDONLY | _NOSUID | _NODEV | _NOEXEC, 0)
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.syscall(_CAPSET[_MACHINE], header, bytes(24)))
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    for code, flags in zip(codes, (_NEW_LISTENER, 0), strict=True):
        instructions = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(instructions))
        result = _libc.syscall(_SECCOMP[_MACHINE], _SET_MODE_FILTER, flags, program)
        if result >= 0:
            return int(result) if flags else -1
    _check(result, "seccomp")
    return -1


def _fork_into(flags: int) -> int:
    """Fork a child into new namespaces; return as `os.fork`, or -1.

    `os.unshare` would take one more fork: a process namespace begins with the next child. Python's
    own work after a fork is skipped, and not needed: there is one thread, and the child forks
    again, by `os.fork`, before a line of a program runs.
    """
    number = ctypes.c_long(_CLONE[_MACHINE])
    arguments = [ctypes.c_ulong(flags | signal.SIGCHLD), *[ctypes.c_ulong(0)] * 4]
    return int(_libc_with_lock.syscall(number, *arguments))


def _plan_tree(home: str) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return mounts and links of Python and the system's programs, and what to hide in them."""
    links = dict(_LINKS)
    binds = {f"/dev/{name}": f"/dev/{host}" for name, host in _DEVICES.items()}
    for path in map(Path, _SYSTEM):
        if path.is_symlink():
            links[str(path)] = str(path.readlink())
        elif path.is_dir():
            binds[str(path)] = str(path)
    binds |= {name: os.path.realpath(name) for name in _SETTINGS if Path(name).exists()}
    prefixes = {"/usr", sys.base_prefix, sys.base_exec_prefix}
    for prefix in prefixes:
        if not Path(prefix).is_relative_to("/usr"):
            if Path(home).is_relative_to(prefix):
                raise RuntimeError(f"Python is installed in {prefix}, with the user's files")
            binds[prefix] = prefix
    masks = {str(path) for prefix in prefixes for p in _MASKED for path in Path(prefix).glob(p)}
    return binds, links, sorted(masks.union(map(os.path.realpath, masks)))


def _build_root(home: str) -> None:
    """Make a tree of read-only mounts the root directory; the host's tree is gone."""
    binds, links, masks = _plan_tree(home)
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("base", "/tmp", "tmpfs", _NOSUID | _NODEV)  # noqa: S108 - only a place to mount on
    os.chdir("/tmp")  # noqa: S108
    for name in ("new", "old"):
        Path(name).mkdir()
    _check(_libc.syscall(_PIVOT_ROOT[_MACHINE], b".", b"old"), "pivot_root")
    os.chdir("/")
    _mount("root", "/new", "tmpfs", _NOSUID | _NODEV, "mode=755")
    for target, source in binds.items():
        place = Path(f"/new{target}")
        is_folder, is_device = Path(f"/old{source}").is_dir(), target.startswith("/dev/")
        (place if is_folder else place.parent).mkdir(parents=True, exist_ok=True)
        if not is_folder:
            place.touch()
        _mount(f"/old{source}", f"/new{target}", None, _BIND | _REC)
        flags = _NOSUID | _NOEXEC if is_device else _RDONLY | _NOSUID | _NODEV
        _set_attributes(f"/new{target}", flags, _AT_RECURSIVE)
    for target, content in [*links.items(), *_FILES.items()]:
        place = Path(f"/new{target}")
        place.parent.mkdir(parents=True, exist_ok=True)
        if target in _FILES:
            place.write_text(content)
        elif not place.exists():  # Python may be installed below /tmp
            place.symlink_to(content)
    for target in masks:
        if Path(f"/new{target}").is_dir():
            _mount("empty", f"/new{target}", "tmpfs", _NOSUID | _NODEV | _RDONLY, "mode=755")
    for name in ("proc", "scratch"):
        Path(f"/new/{name}").mkdir()
    _mount("proc", "/new/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _check(_libc.umount2(b"/old", _DETACH))
    os.chdir("/new")
    _check(_libc.syscall(_PIVOT_ROOT[_MACHINE], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH))
    os.chdir("/")
    _set_attributes("/", _RDONLY | _NOSUID | _NODEV, 0)


def _map_ids(uid: int, gid: int) -> None:
    """Map this user to "nobody" in the new user namespace."""
    texts = {"setgroups": "deny", "uid_map": f"{UID} {uid} 1", "gid_map": f"{UID} {gid} 1"}
    for name, text in texts.items():
        with open(f"/proc/self/{name}", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(text.encode())


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_libc.mount(*texts, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _set_attributes(target: str, flags: int, at_flags: int) -> None:
    attributes, size = struct.pack("QQQQ", flags, 0, 0, 0), ctypes.c_size_t(32)
    number, path = ctypes.c_long(_MOUNT_SETATTR), target.encode()
    result = _libc.syscall(number, _AT_FDCWD, path, at_flags, attributes, size)
    _check(result, f"mount_setattr {target}")


def _check(result: int, what: str = "system call") -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
