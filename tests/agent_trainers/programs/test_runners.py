import os
import sys
import threading
import time

import psutil
import pytest

from agent_envs.errors import ConfigurationError, RolloutError
from agent_trainers.programs.program import ProgramSession, isolation_prefix, make_runner

SESSION = ProgramSession(base_url="http://127.0.0.1:1/v1", key="k1", seed=3)
TASK = {"question": "who ?", "n": 2}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a command that runs some Python."""
    monkeypatch.chdir(tmp_path)

    def write(source):
        (tmp_path / "program.py").write_text(source)
        return f"{sys.executable} program.py"

    return write


def run(kind, program, **options):
    return make_runner(kind, program, **options)(SESSION, TASK)


def stop_once_started(kind, program, folder, num_sleepers=0):
    """Stop a program once it has written a file, and wait for its end."""
    running, ended = run(kind, program), []

    def play():
        with pytest.raises(RolloutError, match="was ended") as caught:
            running.result()
        ended.append(caught.value)

    thread = threading.Thread(target=play)
    thread.start()
    while not (folder / "started").exists():
        time.sleep(0.01)
    assert len(_sleepers()) >= num_sleepers
    running.stop()
    thread.join(10)
    assert ended


def test_a_process_reads_its_task_and_only_the_given_variables(script, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SEARCH_KEY", "wanted")
    program = script(
        "import json, os\n"
        "task = json.loads(input())\n"
        "print('thinking ...')\n"
        "print(json.dumps([task, dict(os.environ)]))\n"
    )
    task, seen = run("process", program, variables=["SEARCH_KEY"]).result()
    assert task == TASK
    names = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "AGENT_R1_SEED", "SEARCH_KEY")
    assert [seen[name] for name in names] == [SESSION.base_url, "k1", "3", "wanted"]
    assert "HF_TOKEN" not in seen


def test_an_outcome_may_contain_other_line_ends_than_newlines(script):
    answer = "one\u2028two\u2029three\x85four"
    program = script(
        "import json, sys\n"
        "sys.stdout.reconfigure(encoding='utf-8')\n"
        f"print(json.dumps({answer!r}, ensure_ascii=False))\n"
    )
    assert run("process", program).result() == answer


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_same_function_runs_in_a_thread_and_in_a_process(kind, tmp_path, monkeypatch):
    name = f"agent_{kind}"
    (tmp_path / f"{name}.py").write_text(
        "import numpy as np\n"
        "from agent_trainers.programs import Outcome\n"
        "async def run(session, task):\n"
        "    print('a message')\n"
        "    metrics = {'key': np.int64(len(session.key))}\n"
        "    return Outcome(reward=np.float32(session.seed + task['n']), metrics=metrics)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    returned = run(kind, f"{name}:run").result()
    if kind == "process":
        outcome = {"reward": 5, "metrics": {"key": 2}, "truncated": False}
        assert returned == outcome
    else:
        assert (returned.reward, returned.metrics) == (5, {"key": 2})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("raise ValueError('too hot')", "exited with 1.*too hot", id="raises"),
        pytest.param("import os; os._exit(3)", "exited with 3", id="exits"),
        pytest.param(
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exited with", id="dies"
        ),
        pytest.param("pass", "not JSON: ''", id="silent"),
        pytest.param("print('done')", "not JSON: 'done'", id="no outcome"),
        pytest.param("import os; os.close(0); os.close(1)", "not JSON: ''", id="closes its pipes"),
    ],
)
def test_the_error_of_a_failed_process_is_reported(script, source, message):
    with pytest.raises(RolloutError, match=f"(?s){message}"):
        run("process", script(source)).result()


def test_a_flood_of_output_is_bounded(script):
    program = script("for _ in range(300): print('x' * 100_000)\nprint(1.0)\n")
    assert run("process", program).result() == 1.0


def test_children_neither_delay_a_process_nor_survive_it_also_where_it_is_stopped(script, tmp_path):
    sleep = "[sys.executable, '-c', 'import time; time.sleep(77.125)']"
    ends = script(f"import subprocess, sys\nsubprocess.Popen({sleep})\nprint(1.0)\n")
    assert run("process", ends).result() == 1.0
    assert not _sleepers()
    stays = script(
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen({sleep}, start_new_session=True)\n"
        "pathlib.Path('started').touch()\n"
        "time.sleep(77.125)\n"
    )
    stop_once_started("process", stays, tmp_path, num_sleepers=1)
    assert not _sleepers()


@pytest.mark.skipif(not isolation_prefix(), reason="this machine has no process namespaces")
def test_a_process_sees_no_other_process(script):
    program = script("import json, os\nprint(json.dumps([p for p in os.listdir('/proc')]))\n")
    seen = {int(name) for name in run("process", program).result() if name.isdigit()}
    assert len(seen) <= 2, "other episodes' keys are in the environments of their processes"
    assert os.getpid() not in seen or os.getpid() <= 2


def test_a_container_gets_sigterm_before_sigkill(script, tmp_path):
    # docker passes SIGTERM on to the container, but a docker that is killed leaves it running
    program = script(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    pathlib.Path('removed').touch()\n"
        "    sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('started').touch()\n"
        "time.sleep(77.125)\n"
    )
    stop_once_started("container", program, tmp_path)
    assert (tmp_path / "removed").exists()


@pytest.mark.parametrize(
    ("kind", "program", "options", "message"),
    [
        ("thread", "node agent.js", {}, "--program_runner process"),
        ("thread", "json:dumps", {"variables": ["X"]}, "--program_env is for"),
        ("process", "no_such_command --x", {}, "there is no command"),
        ("process", "true", {"variables": ["NO_SUCH_VARIABLE"]}, "NO_SUCH_VARIABLE"),
        ("processes", "true", {}, "Did you mean 'process'"),
    ],
)
def test_contradictions_are_refused(kind, program, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigurationError, KeyError), match=message):
        make_runner(kind, program, **options)


def _sleepers():
    """Return the processes that these tests started and that still sleep."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "sleep(77.125)" in line and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
