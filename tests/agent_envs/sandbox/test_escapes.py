"""The escape catalogue: each attack is run, and must come to nothing."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from agent_envs.sandbox import Limits

# Each attack prints ESCAPED if it got through.
ATTEMPT = """
import os, sys
def attempt(attack):
    try:
        found = attack()
    except (OSError, ValueError) as error:
        return
    print("ESCAPED", found)
"""


def run_attack(sandbox, source, limits=None):
    result = sandbox.run_python(ATTEMPT + source, limits=limits)
    assert "ESCAPED" not in result.stdout
    return result


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/hostname", "/root", "/home", "/sys", "/var/log"]
)
def test_a_file_of_the_host_cannot_be_seen(sandbox, path):
    names = "[n for n in os.listdir(P) if n != '.pyenv']"  # the way to Python, when it is there
    attack = f"P = {path!r}\nattempt(lambda: open(P).read())\nattempt(lambda: {names} or 1/0)"
    result = sandbox.run_python(ATTEMPT + attack)
    assert "ESCAPED" not in result.stdout


def test_a_users_file_is_found_by_no_path(sandbox, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("canary")
    package = Path(__file__).resolve()
    run_attack(
        sandbox,
        f"""
roots = ("", "/proc/self/root", "/proc/1/root", "/proc/self/cwd/..", "/scratch/../..", "/old")
for prefix in roots:
    for path in ({str(secret)!r}, {str(package)!r}):
        attempt(lambda: open(prefix + path).read())
""",
    )


def test_the_environment_is_not_the_hosts(sandbox, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "canary-in-the-environment")
    result = sandbox.run_shell("env; cat /proc/*/environ")
    assert "canary" not in result.stdout
    assert "API_TOKEN" not in result.stdout


def test_no_socket_of_any_kind_can_be_made(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        run_attack(
            sandbox,
            f"""
import socket
for family in range(46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(lambda: socket.socket(family, kind))
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=0.2))
attempt(lambda: socket.getaddrinfo("example.org", 80))
""",
        )


def test_writes_outside_the_scratch_directory_fail(sandbox):
    run_attack(
        sandbox,
        """
places = "/ /usr /usr/bin /etc /dev /proc /proc/sys/kernel /proc/self /var /packages /root"
for folder in [*places.split(), sys.prefix]:
    attempt(lambda: open(folder + "/planted", "w"))
    attempt(lambda: os.mkdir(folder + "/planted"))
attempt(lambda: os.chmod("/usr", 0o777))
attempt(lambda: os.chmod("/etc/passwd", 0o777))
attempt(lambda: os.rename("/etc/passwd", "/etc/planted"))
attempt(lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/scratch/x"))
""",
    )


def test_one_program_leaves_nothing_for_the_next(sandbox):
    sandbox.run_shell("echo planted > /scratch/a; echo planted > /tmp/b; echo planted > /dev/shm/c")
    result = sandbox.run_shell("ls -A /scratch /tmp/ /dev/shm/")
    assert result.stdout.split() == ["/dev/shm/:", "/scratch:", "/tmp/:"]


def test_a_fork_bomb_ends_with_its_program(sandbox, quick):
    started = time.monotonic()
    result = sandbox.run_python(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=quick
    )
    assert result.status in ("timeout", "cpu_limit", "memory_limit")
    assert time.monotonic() - started < 30
    assert sandbox.run_python("print(1)").stdout == "1\n"


def test_a_fork_bomb_of_the_shell_ends_with_its_program(sandbox, quick):
    result = sandbox.run_shell("b() { b | b & }; b; sleep 5", limits=quick)
    assert result.status != "ok"
    assert sandbox.run_python("print(1)").stdout == "1\n"


def test_no_more_processes_than_allowed(sandbox, quick):
    result = sandbox.run_python(
        """
import os, time
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
        count += 1
except BlockingIOError:
    print(count)
""",
        limits=quick,
    )
    assert result.stdout == "8\n"


def test_threads_count_as_processes(sandbox, quick):
    result = sandbox.run_python(
        """
import threading, time
try:
    for count in range(1000):
        threading.Thread(target=time.sleep, args=(10,), daemon=True).start()
except RuntimeError:
    print(count + 1)
""",
        limits=quick,
    )
    assert int(result.stdout) <= 8


def test_a_memory_flood_is_stopped(sandbox, quick):
    result = sandbox.run_python("data = bytearray(10**9)", limits=quick)
    assert result.status == "memory_limit"


def test_a_memory_flood_spread_over_processes_is_stopped(sandbox):
    limits = Limits(wall_seconds=5, memory_mb=100, processes=16)
    result = sandbox.run_python(
        """
import os, time
for _ in range(10):
    if os.fork() == 0:
        data = bytearray(os.urandom(1)) * (50 << 20)
        time.sleep(10)
time.sleep(10)
""",
        limits=limits,
    )
    assert result.status == "memory_limit"


def test_memory_cannot_be_hidden_in_files_without_a_name(sandbox):
    run_attack(
        sandbox,
        """
import ctypes
attempt(lambda: os.memfd_create("hidden"))
libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 1 << 20, 0o1600) >= 0:
    print("ESCAPED")
""",
    )


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_flood_is_stopped_while_it_is_produced(sandbox, quick, stream):
    started = time.monotonic()
    result = sandbox.run_python(
        f"import os\nwhile True: os.write({stream}, b'x' * 65536)",
        limits=Limits(wall_seconds=30, cpu_seconds=30, output_chars=2000),
    )
    assert result.status == "output_limit"
    assert len(result.stdout) + len(result.stderr) == 2000
    assert time.monotonic() - started < 20


def test_files_are_limited_one_by_one_and_together(sandbox):
    limits = Limits(file_mb=2, scratch_mb=4)
    result = sandbox.run_python(
        """
import errno
for name in "abc":
    try:
        with open(name, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
    except OSError as error:
        print(name, errno.errorcode[error.errno])
""",
        limits=limits,
    )
    assert result.stdout.split() == ["a", "EFBIG", "b", "EFBIG", "c", "ENOSPC"]


def test_a_link_out_of_the_scratch_directory_leads_nowhere(sandbox, tmp_path):
    (tmp_path / "secret").write_text("canary")
    result = sandbox.run_shell(
        f"ln -s {tmp_path}/secret link; ln -s / tree; ln -s /usr/bin/env bin; cat link\n"
        "echo done > plain",
        collect_files=True,
    )
    assert "canary" not in result.stdout
    assert result.files == {"plain": b"done\n"}  # links are not followed


def test_nothing_outside_can_be_signalled_or_traced(sandbox):
    result = run_attack(
        sandbox,
        f"""
import ctypes, signal
libc = ctypes.CDLL(None, use_errno=True)
for pid in ({os.getpid()}, {os.getppid()}):
    attempt(lambda: os.kill(pid, 0))
    attempt(lambda: os.pidfd_open(pid))
for pid in (1, {os.getpid()}):
    attempt(lambda: open(f"/proc/{{pid}}/mem", "r+b"))
    attempt(lambda: open(f"/proc/{{pid}}/environ"))
    attempt(lambda: os.listdir(f"/proc/{{pid}}/fd"))
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("ESCAPED: traced", pid)
for number in (0, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
    attempt(lambda: os.kill(os.getppid(), number) or "signalled")
print("still watched")
""",
    )
    assert result.stdout == "still watched\n"
    assert result.status == "ok"


def test_the_supervisor_survives_every_signal(sandbox, quick):
    result = sandbox.run_python(
        "import os\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass\n"
        "while True: pass",
        limits=quick,
    )
    assert result.status in ("timeout", "cpu_limit")


def test_proc_shows_the_programs_own_processes_only(sandbox):
    result = sandbox.run_python(
        "import os\nprint(sorted(n for n in os.listdir('/proc')), os.getpid())"
    )
    names = result.stdout
    assert "'1'" not in names
    assert "kcore" not in names
    assert "cpuinfo" not in names


def test_rights_cannot_be_won_back(sandbox):
    result = run_attack(
        sandbox,
        """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x80):
    if libc.unshare(flags) == 0:
        print("ESCAPED unshare", hex(flags))
if libc.mount(b"x", b"/scratch", b"tmpfs", 0, None) == 0 or libc.umount2(b"/proc", 2) == 0:
    print("ESCAPED mount")
if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0:
    print("ESCAPED clone")
if libc.syscall(425, 4, ctypes.create_string_buffer(200)) >= 0:
    print("ESCAPED io_uring")
if libc.syscall(0x40000000 + 39) >= 0:
    print("ESCAPED x32")
attempt(lambda: os.setuid(0))
attempt(lambda: os.setgroups([0]))
attempt(lambda: os.chroot("/scratch"))
attempt(lambda: os.mknod("/scratch/disk", 0o060600, os.makedev(254, 0)))
import resource
attempt(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)))
print(open("/proc/self/status").read())
""",
    )
    assert "NoNewPrivs:\t1" in result.stdout
    assert "CapEff:\t0000000000000000" in result.stdout
    assert "CapPrm:\t0000000000000000" in result.stdout
    assert "Seccomp:\t2" in result.stdout


def test_no_descriptor_of_ours_is_inherited(sandbox):
    result = sandbox.run_python(
        "import os\nfor n in range(1000):\n    try: os.fstat(n)\n    except OSError: continue\n"
        "    print(n)"
    )
    assert result.stdout.split() == ["0", "1", "2"]


def test_background_processes_end_with_the_program(sandbox, leaves_nothing):
    result = sandbox.run_python(
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            try: __import__("signal").signal(number, __import__("signal").SIG_IGN)
            except OSError: pass
        time.sleep(60)
    os._exit(0)
print("main is done")
"""
    )
    assert (result.status, result.stdout) == ("ok", "main is done\n")
    leaves_nothing()


def test_processor_time_of_the_whole_tree_counts(sandbox):
    limits = Limits(wall_seconds=20, cpu_seconds=0.5)
    result = sandbox.run_python("import os\nos.fork()\nos.fork()\nwhile True: pass", limits=limits)
    assert result.status == "cpu_limit"


def test_a_sleeping_program_is_ended_by_the_clock(sandbox, quick):
    result = sandbox.run_python("import time\ntime.sleep(60)", limits=quick)
    assert (result.status, result.exit_code) == ("timeout", None)


def test_a_program_that_ignores_every_signal_is_ended_too(sandbox, quick):
    result = sandbox.run_shell("trap '' TERM INT HUP XCPU; while :; do :; done", limits=quick)
    assert result.status in ("timeout", "cpu_limit")


def test_concurrent_programs_do_not_see_each_other(sandbox):
    results = {}

    def run(name):
        results[name] = sandbox.run_python(
            f"import os, time\nopen('{name}', 'w')\ntime.sleep(0.2)\n"
            "print(sorted(os.listdir('.')), len([n for n in os.listdir('/proc') if n.isdigit()]))"
        ).stdout

    threads = [threading.Thread(target=run, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: f"['{name}'] 1\n" for name in "abcd"}


def test_signals_reach_nobody_outside(sandbox):
    received = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        sandbox.run_python("import os, signal\nos.kill(-1, signal.SIGUSR1)")
        sandbox.run_python(f"import os\nos.kill({os.getpid()}, 10)")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == []
