"""Levels of isolation: how one is chosen and tested, and the two weaker ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError, SandboxUnavailableError, UnknownNameError
from agent_envs.sandbox import Limits, launching, open_sandbox

FAKE_ENGINE = """#!/bin/sh
# Takes a docker command line, writes it down, and runs what would run in the container, here.
printf '%s\\n' "$@" >> "{folder}/arguments"
[ "$1" = run ] || exit {exit_code}
while [ "$1" != an-image ]; do shift; done
shift
mkdir "{folder}/scratch$$" && cd "{folder}/scratch$$" && exec {python} "$@"
"""
FORK_BOMB = "import os, time\nwhile os.fork(): pass\ntime.sleep(9)"


@pytest.fixture
def fake_docker(tmp_path, monkeypatch):
    def install(exit_code=0):
        engine = tmp_path / "docker"
        engine.write_text(
            FAKE_ENGINE.format(
                folder=tmp_path, python=os.path.realpath(sys.executable), exit_code=exit_code
            )
        )
        engine.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return tmp_path / "arguments"

    return install


def test_wrong_arguments_are_refused(fake_docker):
    with pytest.raises(UnknownNameError, match="Did you mean 'strong'"):
        open_sandbox("stron")
    with pytest.raises(ConfigurationError, match="uses no image"):
        open_sandbox("strong", image="python:3.11")
    fake_docker(exit_code=1)
    with pytest.raises(SandboxUnavailableError, match=r"docker\) with the image 'an-image'"):
        open_sandbox("container", image="an-image")


def test_gvisor_is_a_container_with_its_runtime_or_is_refused(fake_docker):
    arguments = fake_docker()
    with open_sandbox("gvisor", image="an-image") as sandbox:
        assert sandbox.level == "gvisor"
        assert sandbox.run_python("print(1)").stdout == "1\n"
    given = arguments.read_text().split("run\n")[-1].splitlines()
    assert {"--runtime=runsc", "--network=none", "--cap-drop=ALL"} <= set(given)
    engine = arguments.with_name("docker")
    refuse = '#!/bin/sh\n[ "$2" = --runtime=runsc ] && exit 1'
    engine.write_text(engine.read_text().replace("#!/bin/sh", refuse))
    with pytest.raises(SandboxUnavailableError, match="needs the runtime `runsc`"):
        open_sandbox("gvisor", image="an-image")


def test_a_level_that_is_not_offered_is_refused_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(launching, "BOOTSTRAP", "import sys; sys.exit('unshare: not permitted')")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    with pytest.raises(SandboxUnavailableError, match="unshare: not permitted"):
        open_sandbox("strong")
    with pytest.raises(SandboxUnavailableError, match="here: neither"):
        open_sandbox("container")


@pytest.mark.usefixtures("sandbox")  # skips where there is no strong isolation
@pytest.mark.parametrize(
    "less",
    [
        pytest.param(["setpriv", "--bounding-set", "-sys_admin"], id="no CAP_SYS_ADMIN"),
        pytest.param(["unshare", "--user", "--map-root-user"], id="a single user"),
    ],
)
def test_strong_isolation_works_with_fewer_rights(less):
    source = (
        "from agent_envs.sandbox import Limits, open_sandbox\n"
        "with open_sandbox() as sandbox:\n"
        "    print(sandbox.run_python('import os; print(os.getuid())').stdout, end='')\n"
        "    limits = Limits(processes=8, wall_seconds=5)\n"
        f"    print(sandbox.run_python({FORK_BOMB!r}, limits=limits).status)\n"
    )
    if subprocess.run([*less, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"{less[0]} does not work here")
    done = subprocess.run(
        [*less, sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[0] == "65534", done.stderr
    assert done.stdout.split()[1] in ("process_limit", "error")


@pytest.mark.usefixtures("sandbox")  # skips where there is no strong isolation
def test_a_sandbox_whose_probe_sees_too_much_is_not_called_strong(monkeypatch):
    leak = 'import json; print(json.dumps(["a file of the host"]))'
    monkeypatch.setattr(launching, "PROBE", leak)
    with pytest.raises(SandboxUnavailableError, match=r"a probe found.*a file of the host"):
        open_sandbox()


def test_the_probe_does_see_what_a_weaker_level_shows(plain_sandbox, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("canary")
    result = plain_sandbox.run_python(f"CANARY = {str(canary)!r}\n{launching.PROBE}")
    for sight in ("a file of the host", "a socket", "other processes", "more rights"):
        assert sight in result.stdout


def test_plain_limits_hold(plain_sandbox):
    quick = Limits(wall_seconds=2, cpu_seconds=2, memory_mb=128, output_chars=1000, processes=8)
    sources = ("print(1)", "import time; time.sleep(60)", "bytearray(10**9)", "1 / 0", FORK_BOMB,
               "while True: print('x' * 100)")  # fmt: skip
    statuses = [plain_sandbox.run_python(source, limits=quick).status for source in sources]
    assert statuses[:4] == ["ok", "timeout", "memory_limit", "error"]
    assert statuses[4] in ("process_limit", "error")  # the kernel does not limit root
    assert statuses[5] == "output_limit"


def test_plain_limits_end_processes_that_left_their_group_and_parent(plain_sandbox, tmp_path):
    plain_sandbox.run_python(
        f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not os.path.exists({str(tmp_path / "pid")!r}): time.sleep(0.01)
time.sleep(0.1)
"""
    )
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_the_environment_is_clean_at_every_level(sandbox, plain_sandbox, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "canary")
    assert "canary" not in plain_sandbox.run_shell("env").stdout
    assert "canary" not in sandbox.run_shell("env; cat /proc/*/environ").stdout


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("d=$PWD; cd /; rmdir $d; ln -s {victim} $d", id="a link instead"),
        pytest.param("d=$PWD; cd /; rmdir $d; echo x > $d", id="a file instead"),
        pytest.param(
            "ln -s {victim} link; mkdir -p a/b; ln -s {victim} a/b; chmod 0 a", id="below"
        ),
        pytest.param("rm -rf $PWD", id="nothing"),
        pytest.param("kill -9 $PPID; mkdir -p a/b; chmod 0 a; sleep 0.1", id="no supervisor"),
        pytest.param(
            "python3 -c 'import os\nfor _ in range(1500): os.mkdir(\"d\"); os.chdir(\"d\")\n"
            "os.kill(os.getppid(), 9)'", id="deep",
        ),
    ],
)  # fmt: skip
def test_cleaning_up_removes_everything_and_follows_no_link(
    plain_sandbox, leaves_nothing, tmp_path, script
):
    victim = tmp_path / "victim"
    (victim / "sub").mkdir(parents=True)
    (victim / "sub").chmod(0o755)
    status = plain_sandbox.run_shell(script.replace("{victim}", str(victim))).status
    assert status in ("ok", "error")
    assert (victim / "sub").stat().st_mode & 0o777 == 0o755
    leaves_nothing()


def test_a_container_is_restricted_and_runs_programs_sessions_and_checks(
    fake_docker, leaves_nothing
):
    arguments = fake_docker()
    limits = Limits(memory_mb=256, processes=10, scratch_mb=32, output_chars=400_000)
    big = "x" * 300_000  # more than a pipe holds
    with open_sandbox("container", image="an-image") as sandbox:
        assert sandbox.level == "container"
        result = sandbox.run_shell(
            "cat a; echo e >&2", files={"a": big}, limits=limits, collect_files=True
        )
        assert (result.status, result.stdout, result.stderr) == ("ok", big, "e\n")
        assert result.files == {"a": big.encode()}
        given = arguments.read_text().splitlines()
        quick, narrow = Limits(wall_seconds=0.5), Limits(wall_seconds=30, output_chars=2000)
        assert sandbox.run_python("import time; time.sleep(9)", limits=quick).status == "timeout"
        flood = "while 1: print('x' * 99)"
        assert sandbox.run_python(flood, limits=narrow).status == "output_limit"
        with sandbox.session(limits) as session:
            session.run(f"x = {big!r}")
            for _ in range(3):  # a reply never arrives before the output that preceded it
                assert session.run("print(x)").stdout == big + "\n"
        assert sandbox.check_python("def f(): return 1", "assert f() == 1").passed
        assert not sandbox.check_python("import os; os._exit(0)", "assert f() == 1").passed
    leaves_nothing()
    for argument in """
        --rm --network=none --read-only --cap-drop=ALL --security-opt=no-new-privileges
        --user=65534:65534 --memory=320m --memory-swap=320m --pids-limit=14 --log-driver=none
        --tmpfs=/scratch:rw,exec,nosuid,nodev,size=32m,mode=1777
    """.split():
        assert argument in given
