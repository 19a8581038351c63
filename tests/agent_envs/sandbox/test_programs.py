"""What programs and sessions do that mean no harm, or none in particular."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError, SandboxError
from agent_envs.sandbox import Limits, open_sandbox
from agent_envs.sandbox.sandbox import _end
from tests.agent_envs.sandbox.conftest import processes_below


def test_a_program_reads_files_and_leaves_files(sandbox):
    result = sandbox.run_python(
        "data = open('in/a.txt').read()\nopen('b.bin', 'wb').write(b'\\xff')\nprint(data)",
        files={"in/a.txt": "given"},
        collect_files=True,
    )
    assert (result.status, result.exit_code, result.stdout) == ("ok", 0, "given\n")
    assert result.files == {"in/a.txt": b"given", "b.bin": b"\xff"}
    script = "cat a.txt && printf 'a\\377b' >&2 && exit 3"
    result = sandbox.run_shell(script, files={"a.txt": "text\n"})
    assert (result.status, result.exit_code) == ("error", 3)
    assert (result.stdout, result.stderr) == ("text\n", "a\ufffdb")  # no UTF-8


def test_the_exit_code_is_the_programs(sandbox):
    sources = ("import sys; sys.exit('bad')", "import os; os._exit(4)",
               "import os; os.kill(os.getpid(), 9)", "import atexit; atexit.register(print)",
               "def f(): 1 / 0\nf()")  # fmt: skip
    results = [sandbox.run_python(source) for source in sources]
    assert [result.exit_code for result in results] == [1, 4, -9, 0, 1]
    assert [result.stderr for result in results[:4]] == ["bad\n", "", "", ""]
    assert "line 1, in f" in results[4].stderr
    assert "agent_envs" not in results[4].stderr  # nothing of ours


@pytest.mark.parametrize("wrong", [{"wall_seconds": 0}, {"processes": -1}, {"memory_mb": 8}])
def test_limits_that_nothing_can_run_under_are_refused(wrong):
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Limits(**wrong)


def test_a_session_keeps_its_state_and_survives_exceptions(sandbox):
    limits = Limits(wall_seconds=5, cpu_seconds=0.5, output_chars=2000)  # of each call
    busy = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    with sandbox.session(limits) as session:
        for _ in range(3):
            assert session.run(busy + "\nprint('x' * 1900)").status == "ok"
        assert session.run("import math\nx = 20").status == "ok"
        failed = session.run("print('before')\n1 / 0")
        assert (failed.status, failed.stdout) == ("error", "before\n")
        assert "ZeroDivisionError" in failed.stderr
        assert session.run("def broken(").status == "error"
        assert session.run("math.sqrt(x + 5)").stdout == "5.0\n"  # shown as at a prompt
        assert session.run("x = 1; x").stdout == "1\n"
        assert session.run("None").stdout == ""
        assert session.run("open('kept.txt', 'w').write('1')").stdout == "1\n"
        assert session.run("open('kept.txt').read()").stdout == "'1'\n"


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("while True: pass", "cpu_limit"),
        ("import time; time.sleep(100)", "timeout"),
        ("while True: print('x' * 1000)", "output_limit"),
        ("import sys; sys.exit(3)", "error"),
        ("import os; os._exit(0)", "ok"),
        ("import os; os.write(3, b'forged nonsense'); os.pause()", "error"),
        ("import os; os.close(3)", "error"),
    ],
)
def test_a_call_that_ends_the_session_says_so(sandbox, source, status):
    limits = Limits(wall_seconds=1, cpu_seconds=0.2, output_chars=5_000)
    with sandbox.session(limits) as session:
        assert session.run("x = 1").status == "ok"
        assert session.run(source).status == status
        assert session.is_closed
        after = session.run("x")
        assert after.status == "closed"
        assert after.stderr == "The session has ended, and its variables are gone."


def test_a_session_that_nobody_closes_ends_with_its_last_reference(sandbox, leaves_nothing):
    sandbox.session().run("x = 1")
    gc.collect()
    leaves_nothing()


def test_a_fork_does_not_end_the_sessions_of_its_parent(sandbox):
    with sandbox.session() as session:
        assert session.run("x = 1").status == "ok"
        child = os.fork()
        if child == 0:
            _end(session._execution, os.getppid())
            os._exit(0)
        os.waitpid(child, 0)
        assert session.run("x").stdout == "1\n"


def test_a_session_stands_still_between_its_calls(sandbox):
    with sandbox.session() as session:
        session.run(
            "import threading, time\nn = 0\ndef count():\n    global n\n    while True:\n"
            "        n += 1\n        time.sleep(0.001)\n"
            "threading.Thread(target=count, daemon=True).start()"
        )
        threading.Event().wait(0.5)
        assert int(session.run("n").stdout) < 250


DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except OSError: pass
        time.sleep(60)
    os._exit(0)
print("main is done")
"""


def test_runs_leave_no_process_no_file_and_no_descriptor(sandbox, leaves_nothing):
    for _ in range(3):
        sandbox.run_shell("sleep 100 & echo x > left; mkdir -p a/b")
        result = sandbox.run_python(DAEMON)
        assert (result.status, result.stdout) == ("ok", "main is done\n")
        sandbox.check_python("def f(): return 1", "assert f() == 1")
        sandbox.session().close()
    leaves_nothing()


@pytest.mark.usefixtures("sandbox")  # skips where there is no strong isolation
def test_closing_the_sandbox_ends_everything(leaves_nothing):
    sandbox = open_sandbox("strong")
    session = sandbox.session()
    session.run("import subprocess\np = subprocess.Popen(['sleep', '100'])")
    sandbox.close()
    ended = session.run("p")
    assert (ended.status, ended.exit_code) == ("error", -9)
    assert "ended together with its supervisor" in ended.stderr
    assert session.is_closed
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run_python("pass")
    leaves_nothing()


def test_a_killed_zygote_is_replaced(sandbox):
    for pid in processes_below(sandbox._launcher._process.pid):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert sandbox.run_python("print(1)").stdout == "1\n"


@pytest.mark.usefixtures("sandbox")  # skips where there is no strong isolation
@pytest.mark.parametrize("level", ["strong", "limits"])
def test_nothing_outlives_a_host_that_is_killed(level, leaves_nothing):
    host = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from agent_envs.sandbox import open_sandbox\n"
            f"session = open_sandbox({level!r}).session()\n"
            "session.run(\"import subprocess; subprocess.Popen(['sleep', '100'])\")\n"
            "print('ready', flush=True)\n"
            "input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with host:
        assert host.stdout.readline() == b"ready\n"
        inside = processes_below(host.pid)
        assert len(inside) >= 3
        host.kill()
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{pid}").exists() for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    leaves_nothing()
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
