"""What the machine offers is tried, and said with its reason."""

import subprocess
import sys

import pytest

from agent_envs.errors import SandboxUnavailableError
from agent_envs.sandbox import Limits, doctor, open_sandbox, strong

FORK_BOMB = "import os, time\nwhile os.fork(): pass\ntime.sleep(9)"


def test_every_level_is_tried_and_what_is_missing_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(strong, "BOOTSTRAP", "import sys; sys.exit('unshare: not permitted')")
    findings = {finding.level: finding for finding in doctor.examine()}
    assert list(findings) == ["strong", "container", "limits"]
    assert "unshare: not permitted" in findings["strong"].reason
    assert "apt install podman" in findings["container"].reason
    assert findings["limits"].is_offered
    assert any("nothing is hidden" in note for note in findings["limits"].limitations)


def test_the_command_prints_what_it_found(sandbox):
    text = subprocess.run(
        [sys.executable, "-m", "agent_envs.sandbox"], capture_output=True, text=True, check=True
    ).stdout
    assert "level='strong': yes" in text
    assert "CAP_SYS_ADMIN" in text


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


def test_processes_are_limited_even_where_the_kernel_does_not(plain_sandbox):
    limits = Limits(processes=8, wall_seconds=5)
    assert plain_sandbox.run_python(FORK_BOMB, limits=limits).status in ("process_limit", "error")


def test_a_level_that_is_not_offered_is_refused_as_the_doctor_says(monkeypatch):
    monkeypatch.setattr(strong, "_OLDEST_KERNEL", (99, 0))
    finding = doctor.examine()[0]
    with pytest.raises(SandboxUnavailableError) as caught:
        open_sandbox()
    assert (finding.is_offered, finding.reason) == (False, str(caught.value))
