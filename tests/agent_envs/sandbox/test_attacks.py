"""Attacks by class: on the host's files and rights, on supervision, on neighbours, on limits."""

import os
import platform
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from agent_envs.sandbox import Limits, control_groups, execution
from tests.agent_envs.sandbox.conftest import processes_below

NARROW = Limits(wall_seconds=8, cpu_seconds=8, memory_mb=128, processes=16)
PRELUDE = """
import ctypes, errno, os, resource, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(attack):
    try: found = attack()
    except (OSError, ValueError): return
    print("ESCAPED", found)
def refused(*numbers):
    if libc.syscall(*[ctypes.c_long(n) for n in numbers]) >= 0:
        print("ESCAPED", numbers)
    elif ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        print("REACHED THE KERNEL", numbers, errno.errorcode[ctypes.get_errno()])
"""


def run(sandbox, source, limits=NARROW):
    result = sandbox.run_python(PRELUDE + source, limits=limits)
    assert "ESCAPED" not in result.stdout
    return result


# A few of each kind; test_filter has the others.
CALLS = """
    302,1,7,0,0 62,1,9 434,1,0 203,1,8,0 141,2,65534,19 101,16,1,0,0 250,0,0,0,0 425,4,0 206,1,0
    321,0,0,0 165,0,0,0,0,0 272,0x10000000 435,0,0 56,0x10000011 56,0x8011 41,2,1,0 53,16,3,0,0
    49,0,0,0 46,0,0,0 319,0,0 29,0,4096,0x380 253 72,0,1031,1048576 246,0,0,0,0 157,22,2,0
    157,0x59616d61,1 317,1,0,0 464 599 0x40000029
""".split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
def test_a_call_that_could_reach_further_is_refused_before_the_kernel_sees_it(sandbox):
    lines = "".join(f"refused({call})\n" for call in CALLS)
    assert run(sandbox, f"{lines}print('alive')").stdout == "alive\n"


ESCAPES = {
    "files of the host": ("""
for path in ("/etc/shadow", "/etc/hostname", "/root", "/home", "/sys", "/var/log"):
    attempt(lambda: open(path).read())
    attempt(lambda: [n for n in os.listdir(path) if n != ".pyenv"] or int("nothing"))
""", ""),
    "the user's files by any path": ("""
for prefix in " /proc/self/root /proc/1/root /proc/self/cwd/.. /scratch/../.. /old".split(" "):
    for path in ({secret!r}, {package!r}):
        attempt(lambda: open(prefix + path).read())
""", ""),
    "installed packages": ("""
import glob
for prefix in ("/usr", "/usr/local", sys.base_prefix):
    for folder in glob.glob(prefix + "/lib*/python*/*-packages"):
        if os.listdir(folder): print("ESCAPED", folder)
""", ""),
    "sockets of any kind": ("""
for family in range(46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        attempt(lambda: socket.socket(family, kind))
attempt(lambda: socket.create_connection(("127.0.0.1", {port}), timeout=0.2))
attempt(lambda: socket.getaddrinfo("example.org", 80))
""", ""),
    "writes outside the scratch directory": ("""
places = "/ /usr /usr/bin /etc /dev /proc /proc/sys/kernel /proc/self /var /packages /root"
for folder in [*places.split(), sys.prefix]:
    attempt(lambda: open(folder + "/planted", "w"))
    attempt(lambda: os.mkdir(folder + "/planted"))
attempt(lambda: os.chmod("/usr", 0o777))
attempt(lambda: os.chmod("/etc/passwd", 0o777))
attempt(lambda: os.rename("/etc/passwd", "/etc/planted"))
attempt(lambda: open("/proc/sys/kernel/core_pattern", "w").write("|/scratch/x"))
""", ""),
    "writes below /proc": ("""
for folder, _, names in os.walk("/proc/self"):
    if folder.count("/") > 4 or "/fd" in folder or "map_files" in folder: continue
    for name in names:
        path = os.path.join(folder, name)
        attempt(lambda: (os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)), path))
""", ""),
    "its rank as first victim of a full machine": ("""
print(open("/proc/self/oom_score_adj").read())
""", "1000\n\n"),
    "processes outside": ("""
for pid in ({pid}, {ppid}):
    attempt(lambda: os.kill(pid, 0))
    attempt(lambda: os.pidfd_open(pid))
for pid in (1, {pid}):
    attempt(lambda: open(f"/proc/{{pid}}/mem", "r+b"))
    attempt(lambda: open(f"/proc/{{pid}}/environ"))
    attempt(lambda: os.listdir(f"/proc/{{pid}}/fd"))
    if libc.ptrace(16, pid, 0, 0) == 0: print("ESCAPED: traced", pid)
for number in range(65): attempt(lambda: os.kill(os.getppid(), number) or "signalled")
names = os.listdir("/proc")
print([n for n in ("1", "kcore", "cpuinfo") if n in names], "still watched")
""", "[] still watched\n"),
    "rights": ("""
attempt(lambda: os.setuid(0))
attempt(lambda: os.setgroups([0]))
attempt(lambda: os.chroot("/scratch"))
attempt(lambda: os.mknod("/scratch/disk", 0o060600, os.makedev(254, 0)))
attempt(lambda: resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999)))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*[int(status[name], 16) for name in ("NoNewPrivs", "CapEff", "CapPrm", "Seccomp")])
""", "1 0 0 2\n"),
    "descriptors of the host": ("""
for n in range(1000):
    try: os.fstat(n)
    except OSError: continue
    print(n)
""", "0\n1\n2\n"),
    "memory in files without a name": ("""
import mmap
zero = os.open("/dev/zero", os.O_RDWR)
attempt(lambda: mmap.mmap(zero, 64 << 20))
print(os.read(zero, 3) == bytes(3), len(mmap.mmap(-1, 4096)))
""", "True 4096\n"),
    "pending signals and descriptors of the user": ("""
signal.pthread_sigmask(signal.SIG_BLOCK, {{40}})
for _ in range(1000): os.kill(os.getpid(), 40)
(queued,) = [line for line in open("/proc/self/status") if line.startswith("SigQ")]
print(queued.split()[1])
kept = []
try:
    while True: kept.append(os.pipe())
except OSError: print(len(kept) < 64)
""", "128/128\nTrue\n"),
    "the listener that could allow its calls": (
        "print(os.listdir('/proc/self/fd'))", "['0', '1', '2', '3']\n"  # that of the folder is 3
    ),
    "the path of the host's control group": (
        "print({{line.split(':')[2] for line in open('/proc/self/cgroup')}})", "{'/\\n'}\n"
    ),
    "a flush of all disks": ("os.sync(); print('done')", "done\n"),
    "more or larger files": ("""
for name in "abcdef":
    try:
        with open(name, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)): pass
    except OSError as error: print(name, errno.errorcode[error.errno])
""", "a EFBIG\nb EFBIG\nc EFBIG\nd EFBIG\ne ENOSPC\nf ENOSPC\n"),
    "more processes": ("""
count = 1
try:
    while True:
        if os.fork() == 0:
            time.sleep(10)
            os._exit(0)
        count += 1
except BlockingIOError: print(count)
""", "16\n"),
    "more threads": ("""
try:
    for count in range(1000): threading.Thread(target=time.sleep, args=(10,), daemon=True).start()
except RuntimeError: print(count + 1 <= 16, flush=True)
os._exit(0)
""", "True\n"),
}  # fmt: skip


@pytest.mark.parametrize("wanted", ESCAPES)
def test_a_program_cannot_reach_or_change(sandbox, wanted, tmp_path):
    (tmp_path / "secret.txt").write_text("canary")
    source, stdout = ESCAPES[wanted]
    limits = Limits(processes=16, memory_mb=128, file_mb=2, scratch_mb=8)
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = source.format(
            secret=str(tmp_path / "secret.txt"), package=str(Path(__file__).resolve()),
            port=server.getsockname()[1], pid=os.getpid(), ppid=os.getppid(),
        )  # fmt: skip
        result = run(sandbox, source, limits)
    assert (result.stderr, result.stdout) == ("", stdout)


ENDED = {
    # The shell ends itself if it cannot fork, so a child is the bomb.
    "a fork bomb of the shell": """
os.execv('/bin/sh', ['sh', '-c', 'b() { b | b & }; b & while :; do :; done'])
""",
    "a fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "a memory flood": "data = bytearray(10**9)",
    "a memory flood over many processes": """
for _ in range(10):
    if os.fork() == 0:
        data = bytearray(os.urandom(1)) * (50 << 20)
        time.sleep(10)
time.sleep(10)
""",
    "busy processes": "os.fork()\nos.fork()\nwhile True: pass",
    "sleep": "time.sleep(60)",
    "signals to the supervisor": """
for n in range(1, 65):
    try: os.kill(1, n)
    except OSError: pass
while True: pass
""",
    "ignored signals": """
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "an output flood": "while True: os.write(1, b'x' * 65536)",
    "an output flood of errors": "while True: os.write(2, b'x' * 65536)",
    "children whose time vanishes": """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
def burn():
    if os.fork() == 0:
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        os._exit(0)
    time.sleep(0.1)
while True:
    try: burn()
    except OSError: pass
""",
}


@pytest.mark.parametrize("attack", ENDED)
def test_a_limit_ends(sandbox, attack):
    limits = Limits(
        wall_seconds=1.5, cpu_seconds=0.7, memory_mb=100, processes=12, output_chars=2000
    )
    result = run(sandbox, ENDED[attack], limits)
    word = next((w for w in ("memory", "output", "sleep") if w in attack), "limit")
    assert word.replace("sleep", "timeout") in result.status or (
        word == "limit" and result.status == "timeout"
    )
    assert len(result.stdout) + len(result.stderr) <= 2000
    assert sandbox.run_python("print(1)").stdout == "1\n"


VANISHING = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.004: pass
        os._exit(0)
    {while_it_runs}
    try: os.wait()
    except OSError: pass
    {afterwards}
"""
WRITE = 'os.write(1, b".")'


@pytest.mark.parametrize(
    ("while_it_runs", "afterwards"),
    # output wakes the supervisor, here at a moment in which no child runs
    [(WRITE, "pass"), ("pass", f"{WRITE}; time.sleep(0.001)")],
    ids=["openly", "hiding"],
)
@pytest.mark.parametrize("has_groups", [True, False])
def test_processor_time_counts_of_children_that_no_sum_contains(
    sandbox, monkeypatch, has_groups, while_it_runs, afterwards
):
    if not has_groups:
        monkeypatch.setattr(control_groups, "_own_folder", Path("/nowhere").resolve)
    source = VANISHING.format(while_it_runs=while_it_runs, afterwards=afterwards)
    result = run(sandbox, source, Limits(wall_seconds=20, cpu_seconds=0.5))
    assert result.status == "cpu_limit"
    # each child takes 4 ms; samples are right on average only, and without a limit 20 s pass
    assert len(result.stdout) * 0.004 < 4 * 0.5


def test_results_tell_time_memory_and_denied_calls(sandbox, plain_sandbox):
    source = """
import socket
data = bytearray(b"x") * (80 << 20)
time.sleep(0.2)
for _ in range(3):
    try: socket.socket()
    except PermissionError: pass
"""
    result = run(sandbox, source, Limits())
    assert result.denied_calls == 3
    assert result.seconds >= 0.2
    assert 80 < result.peak_memory_mb < 160
    assert run(plain_sandbox, "pass", Limits()).denied_calls is None
    with sandbox.session() as session:
        assert session.run(f"import time\n{source}").denied_calls == 3
        assert session.run("1").denied_calls == 0


def test_a_flood_of_denied_calls_is_counted_to_a_limit_and_stays_denied(sandbox):
    source = "for _ in range(3000): attempt(socket.socket)"
    result = run(sandbox, source, Limits())
    assert (result.status, result.stdout, result.denied_calls) == ("ok", "", 1000)


HOLD = {
    "shared pages without a mapping of them": """
import mmap
for _ in range(8):
    if os.fork() == 0:
        kept = []
        for _ in range(20):
            kept.append(mmap.mmap(-1, 4 << 20)); kept[-1].write(bytes(4 << 20))
            kept[-1].madvise(mmap.MADV_DONTNEED)
        time.sleep(60)
time.sleep(60)
""",
    "shared objects of which a page is mapped": """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for _ in range(100):
    place = libc.mmap(None, 4 << 20, 3, 0x21, -1, 0)
    if place in (None, 2**64 - 1): break
    ctypes.memset(place, 1, 4 << 20)
    libc.munmap(place + 4096, (4 << 20) - 4096)
time.sleep(60)
""",
    "processes whose first thread has ended": """
for _ in range(6):
    if os.fork() == 0:
        def hold():
            time.sleep(0.3)  # by then all first threads have ended
            data = bytearray(b"x") * (40 << 20)
            time.sleep(60)
        threading.Thread(target=hold).start()
        libc.syscall({exit})
time.sleep(60)
""",
    "full sockets": """
kept = []
for _ in range(12):
    if os.fork() == 0:
        while True:
            try: pair = socket.socketpair()
            except OSError: break
            kept.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while True: end.send(bytes(4096))
                except OSError: pass
        time.sleep(60)
time.sleep(60)
""",
    "full pipes": """
kept = []
for _ in range(40):
    ends = os.pipe2(os.O_NONBLOCK)  # a user with many pipes gets smaller ones
    kept.append(ends)
    os.write(ends[1], bytes(65536))
for _ in range(14):
    if os.fork() == 0:
        os.closerange(3, 128)
        while True:
            try: ends = os.pipe2(os.O_NONBLOCK)
            except OSError: break
            os.write(ends[1], bytes(65536))
        hold = bytearray(b"x") * (4 << 20)
        time.sleep(60)
time.sleep(60)
""",
    "full pipes with names": """
for number in range(14):
    if os.fork() == 0:
        hold = bytearray(b"x") * (4 << 20)
        for i in range(110):
            name = f"{number}-{i}"
            os.mkfifo(name)
            os.write(os.open(name, os.O_RDWR | os.O_NONBLOCK), bytes(65536))
            os.unlink(name)
        time.sleep(60)
time.sleep(60)
""",
    "a child that shares the memory of its parent is counted once": """
data = bytearray(b"x") * (70 << 20)
import subprocess
for _ in range(20): subprocess.run(["true"])
print("fits")
""",
}


@pytest.mark.parametrize("way", HOLD)
def test_memory_is_counted_however_it_is_held(sandbox, way):
    exit_number = {"x86_64": 60, "aarch64": 93}[platform.machine()]
    result = run(sandbox, HOLD[way].replace("{exit}", str(exit_number)))
    expected = ("ok", "fits\n") if "once" in way else ("memory_limit", "")
    assert (result.status, result.stdout) == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_ended_supervisor_is_a_failure_of_the_program(sandbox, monkeypatch, number):
    monkeypatch.setattr(execution, "_GRACE_SECONDS", 0.5)
    monkeypatch.setattr(Limits, "longest_seconds", property(lambda limits: limits.wall_seconds))
    results, limits = [], Limits(wall_seconds=1.5)
    source = "while True: print('x', flush=True); __import__('time').sleep(0.01)"
    thread = threading.Thread(
        target=lambda: results.append(sandbox.run_python(source, limits=limits, collect_files=True))
    )
    before = processes_below(sandbox._launcher._process.pid)
    thread.start()
    while len(new := processes_below(sandbox._launcher._process.pid) - before) < 2:
        time.sleep(0.01)  # until the program is there too
    supervisor = next(pid for pid in new if _namespace_pid(pid) == 1)
    os.kill(supervisor, number)
    thread.join(20)
    if number == signal.SIGSTOP:
        os.kill(supervisor, signal.SIGCONT)
    (result,) = results
    assert result.status == ("error" if number == signal.SIGKILL else "timeout")
    assert (result.folder, result.exit_code == 0) == (None, False)


def _namespace_pid(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[-1] for line in lines if line.startswith("NSpid:")))


def test_no_two_programs_share_a_namespace(sandbox):
    kinds = ("net", "ipc", "uts", "mnt", "pid", "user")
    source = f"import os, time\nprint([os.readlink('/proc/self/ns/' + k) for k in {kinds}])"
    with sandbox.session() as session:  # it lives on, so no number is used again
        first = eval(session.run(source).stdout)
        second = eval(sandbox.run_python(source).stdout)
    assert sandbox.run_shell("echo planted > /tmp/b; echo planted > /dev/shm/c").status == "ok"
    assert sandbox.run_shell("ls -A /scratch /tmp/ /dev/shm/ | grep -v :").stdout.split() == []
    own = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in kinds]
    assert all(len({*names}) == 3 for names in zip(first, second, own, strict=True))


def test_a_link_out_of_the_scratch_directory_leads_nowhere(sandbox, tmp_path):
    (tmp_path / "secret").write_text("canary")
    result = sandbox.run_shell(
        f"ln -s {tmp_path}/secret link; ln -s / tree; ln -s /usr/bin/env bin; cat link\n"
        "echo done > plain",
        collect_files=True,
    )
    assert "canary" not in result.stdout
    assert result.files == {"plain": b"done\n"}  # links are not followed


def test_an_idle_session_keeps_no_more_than_it_may(sandbox):
    hoard = """
import os, time
r, w = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        data = bytearray(b"x") * (40 << 20)
        os.write(w, b"x")
        time.sleep(60)
        os._exit(0)
for _ in range(4): os.read(r, 1)
"""
    with sandbox.session(Limits(memory_mb=128, wall_seconds=10)) as session:
        first = session.run(hoard)
        time.sleep(0.3)
        assert "memory_limit" in (first.status, session.run("1").status)


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.closerange(0, 1000)",
        "import os; os.closerange(0, 3); os.open('/dev/null', 2); os.kill(0, 9)",
        "import os\nfor n in range(3, 128):\n    try: os.write(n, b'r\\0\\0\\0\\2{}')\n"
        "    except OSError: pass",
        "import os, signal; os.kill(-1, signal.SIGKILL)",
        "import os, signal; os.killpg(0, signal.SIGSTOP)",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_a_program_that_breaks_itself_is_a_result(sandbox, source):
    result = sandbox.run_python(
        source, limits=Limits(wall_seconds=2, cpu_seconds=1, memory_mb=96), collect_files=True
    )
    assert result.status in ("ok", "error", "timeout", "memory_limit", "cpu_limit")
    assert result.folder is not None
