"""Verify or report a stranger's run in a child process of limited memory, time, files and network.

A run is data: nothing in it runs but agents' actions, in environments that limit them. The
limits are for what was overlooked: then the child ends, and the parent reports it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import AgentEnvsError, DataError
from agent_leaderboard.play.run import end_with_parent
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import Verification, check_run

MAX_MEMORY: Final = 4 * 2**30
"""Bytes per process."""
_LOCAL_HOSTS: Final = ("127.0.0.1", "::1", "localhost")
_MODULE: Final = "agent_leaderboard.verify.contained"


def verify(
    run: Path,
    data: Path | None = None,
    *,
    jobs: int = 1,
    is_published: bool = False,
    max_minutes: float = 60.0,
) -> Verification:
    """Verify a run's folder like `check_run`, within limits."""
    try:
        return Verification(**_in_child("verify", run, data, jobs, is_published, max_minutes))
    except DataError as error:
        return Verification(problems=[f"{run}: could not be verified: {error}"])


def report(run: Path, data: Path | None = None, *, max_minutes: float = 60.0) -> str:
    """Write a run's reports like `write_reports`, within limits; return the table of scores."""
    try:
        text: str = _in_child("report", run, data, 1, False, max_minutes)
    except DataError as error:
        raise DataError(f"{run}: could not be reported: {error}") from None
    return text


def _in_child(
    command: str, run: Path, data: Path | None, jobs: int, is_published: bool, max_minutes: float
) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        paths = (path and str(path.absolute()) for path in (answer, run, data))
        request = [command, *paths, jobs, is_published, max_minutes]
        failure = _run_child(json.dumps(request), 60 * max_minutes)
        try:
            found = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise DataError(failure) from None
    if isinstance(found, list):
        raise DataError(*found)
    return found


def _run_child(request: str, seconds: float) -> str:
    """Run the child and everything it starts to the end; return why there may be no answer."""
    # The current folder may be a stranger's. An empty entry means it, too.
    paths = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()]
    paths += os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    child = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", _MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    try:
        child.communicate(request.encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"it took longer than {seconds / 60:g} minutes"
    finally:
        if sys.platform != "win32":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        child.wait()
    return f"the process ended with {child.returncode}; it may have used too much memory"


# In the child


def _limit(minutes: float) -> None:
    if sys.platform == "win32":
        return
    import resource

    for kind, most in (
        (resource.RLIMIT_DATA, MAX_MEMORY),
        (resource.RLIMIT_CPU, int(60 * minutes) + 60),
        (resource.RLIMIT_FSIZE, 2 * 2**30),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def forbid_network() -> None:
    """Forbid this process to reach other machines."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        is_local = not isinstance(address, tuple) or address[0] in _LOCAL_HOSTS
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        is_local = arguments[0] in (None, "", *_LOCAL_HOSTS)
    else:
        return
    if not is_local:
        raise PermissionError("verification has no network")


def _main(command: str, answer: str, *request: Any) -> None:
    if sys.platform != "win32":  # with everything it started
        end_with_parent(lambda: os.killpg(0, signal.SIGKILL))
    *names, jobs, is_published, minutes = request
    run, data = (name and Path(name) for name in names)
    _limit(minutes)
    forbid_network()
    found: Any
    try:
        if command == "report":
            found = write_reports(run, data)
        else:
            checked = check_run(
                run, data, jobs=jobs, is_published=is_published, prepare_worker=forbid_network
            )
            found = dataclasses.asdict(checked)
    except (AgentEnvsError, OSError) as error:
        found = [str(error)]
    except MemoryError:
        found = [f"it needs more memory than {MAX_MEMORY:,} bytes"]
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*json.load(sys.stdin))
