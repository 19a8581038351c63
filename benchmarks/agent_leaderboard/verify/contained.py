"""Verify a run of others in a process of its own: memory, time, files and network are limited.

A bundle is data, and nothing in it is run but actions of agents, in environments that bound them.
The limits are for what nobody thought of: then the process ends, and this one says so.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import DataError
from agent_leaderboard.verify.bundle import unpack_bundle
from agent_leaderboard.verify.verify import Verification, check_run

MAX_MINUTES: Final = 60.0
MAX_MEMORY: Final = 4 * 2**30
"""Bytes that each process may hold."""
_LOCAL: Final = ("127.0.0.1", "::1", "localhost")
_MODULE: Final = "agent_leaderboard.verify.contained"


def verify(
    run: Path,
    data: Path | None = None,
    *,
    jobs: int = 1,
    reference: Path | None = None,
    max_minutes: float = MAX_MINUTES,
    unpack_to: Path | None = None,
) -> Verification:
    """Check a run as `check_run` does, within limits; see there.

    `run` is a folder, or a bundle that is unpacked into the empty folder `unpack_to`, or into one
    that is deleted afterwards.
    """
    if not run.is_dir() and unpack_to is None:
        with tempfile.TemporaryDirectory() as scratch:
            return verify(
                run,
                data,
                jobs=jobs,
                reference=reference,
                max_minutes=max_minutes,
                unpack_to=Path(scratch),
            )
    names = {"run": run, "data": data, "reference": reference, "unpack_to": unpack_to}
    order = {name: None if path is None else str(path.absolute()) for name, path in names.items()}
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        request = json.dumps(order | {"jobs": jobs, "answer": str(answer), "minutes": max_minutes})
        failure = _run_child(request, 60 * max_minutes)
        try:
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Verification(problems=[f"{run}: could not be verified: {failure}"])
    scores = {name: tuple(numbers) for name, numbers in found.pop("scores").items()}
    return Verification(**found, scores=scores)


def _run_child(request: str, seconds: float) -> str:
    """Let a child do the work; return how it ended. What it started ends with it."""
    paths = [*filter(None, sys.path), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    environment["PYTHONSAFEPATH"] = "1"  # the current folder may be somebody else's
    with _ended_in_order():
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
    return f"the process ended with {child.returncode}; it may have taken too much memory"


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Make an exception of the signals that end this process, so that its child ends with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {getattr(signal, name): signal.signal(getattr(signal, name), _exit) for name in names}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


# In the child


def check(
    run: Path,
    data: Path | None = None,
    *,
    jobs: int = 1,
    reference: Path | None = None,
    unpack_to: Path | None = None,
) -> Verification:
    """Do what `verify` asks for, in this process and without its limits."""
    try:
        folder = run if unpack_to is None else unpack_bundle(run, unpack_to).path
    except DataError as error:
        return Verification(problems=[str(error)])
    found = check_run(folder, data, jobs=jobs, reference=reference, prepare_worker=forbid_network)
    return dataclasses.replace(found, problems=_shortened(found.problems, folder))


def _limit(minutes: float) -> None:
    """Bound this process and those that it starts."""
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
    """Let this process reach no other machine, by name or address."""
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        is_local = not isinstance(address, tuple) or address[0] in _LOCAL
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        is_local = arguments[0] in (None, "", *_LOCAL)
    else:
        return
    if not is_local:
        raise PermissionError("verification has no network")


def _main(request: Mapping[str, Any]) -> None:
    def path(name: str) -> Path | None:
        return None if request[name] is None else Path(request[name])

    _limit(request["minutes"])
    forbid_network()
    run = Path(request["run"])
    try:
        found = check(
            run,
            path("data"),
            jobs=request["jobs"],
            reference=path("reference"),
            unpack_to=path("unpack_to"),
        )
    except MemoryError:
        found = Verification(problems=[f"{run}: takes more memory than {MAX_MEMORY:,} bytes"])
    Path(request["answer"]).write_text(json.dumps(dataclasses.asdict(found)), encoding="utf-8")


def _shortened(problems: Iterable[str], run: Path) -> list[str]:
    """Name files as they are in the run, and cut what others wrote too long."""
    return [text.replace(f"{run}{os.sep}", "")[:2_000] for text in problems]


if __name__ == "__main__":
    _main(json.load(sys.stdin))
