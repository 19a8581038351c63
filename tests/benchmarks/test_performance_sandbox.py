import pytest

from agent_envs.errors import SandboxUnavailableError
from agent_envs.sandbox import open_sandbox
from benchmarks.performance.sandbox import measure


def test_the_report_holds_the_ratio_and_a_clean_leak_check():
    try:
        opened = open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    with opened as sandbox:
        report = measure(sandbox, rounds=2, leak_runs=3)
    assert report["level"] == "strong"
    assert report["ratio"] == report["sandboxed_ms"] / report["bare_python_ms"]
    assert report["leak_check"]["runs"] == 3
    assert report["leak_check"]["files"] == 0
