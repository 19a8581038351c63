"""Run the cells of a table and keep every result, so that a stopped command resumes.

A cell is a key with a JSON specification. Its result is appended to ``results.jsonl`` in the work
folder; the same command computes only the cells without a result for the same specification.
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, Self

from tqdm.auto import tqdm

from agent_envs.data.files import write_json
from agent_envs.errors import AgentEnvsError, ConfigurationError

Spec = Any
"""The JSON value that determines the result of a cell."""
Result = dict[str, Any]
Cells = dict[str, dict[str, Any]]
"""Specifications of cells by key."""
RESULTS_FILE: Final = "results.jsonl"
SETTINGS_FILE: Final = "settings.json"
_LOG_LINES: Final = 5
_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "agent-r1-sft": ("-m", "agent_trainers.cli.sft"),
    "agent-r1-train": ("-m", "agent_trainers.cli.train"),
    "agent-r1-eval": ("-m", "agent_trainers.cli.evaluate"),
    "python": (),
}
"""Commands as this interpreter runs them, so that no installed scripts are needed."""


class CommandFailedError(AgentEnvsError):
    """A command of a cell failed."""


class Grid:
    """The cells of one work folder; a context manager that locks the folder."""

    def __init__(self, work: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        """Set the folder, and the settings that every result there depends on."""
        self.work = Path(work)
        self._settings = dict(settings or {})
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = -1

    def __enter__(self) -> Self:
        """Lock the folder.

        Commands inherit the lock, so a command that survives a killed call still holds it.

        Raises:
            ConfigurationError: If another call uses the folder, or its results have other settings.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.work / ".lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigurationError(
                f"--work {self.work} is in use by another call, or by a command that a killed call "
                "left behind. Wait for it, stop it, or choose another folder."
            ) from None
        self._check_settings()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the folder."""
        os.close(self._lock)

    def run(
        self,
        cells: Mapping[str, Spec],
        compute: Callable[[str, Spec], Result],
        *,
        jobs: int = 1,
        after_each: Callable[[], object] = lambda: None,
    ) -> dict[str, Result]:
        """Compute the missing cells in order, show progress, and return all results by key.

        Args:
            cells: Specification by key.
            compute: Returns the result of a key and its specification.
            jobs: Cells computed at the same time, in threads if more than one.
            after_each: Called after every computed cell.

        Raises:
            CommandFailedError: After all cells, if some failed; names them.
        """
        cells = json.loads(json.dumps(cells))  # as they are stored
        stored = self.stored()
        missing = [key for key in cells if key not in stored or stored[key]["spec"] != cells[key]]
        _check_jobs(jobs)
        failed = []

        def attempt(key: str) -> CommandFailedError | None:
            try:
                self.store({"key": key, "spec": cells[key], "result": compute(key, cells[key])})
            except CommandFailedError as error:
                return error
            return None

        with (
            self._stopping_commands(),
            tqdm(total=len(cells), initial=len(cells) - len(missing), unit="cell") as bar,
        ):
            for key, error in _outcomes(missing, attempt, jobs):
                if error is not None:
                    failed.append(key)
                    tqdm.write(str(error), file=sys.stderr)
                bar.update()
                after_each()
        if failed:
            raise CommandFailedError(f"failed cells: {', '.join(failed)}. See their log.txt.")
        stored = self.stored()
        return {key: stored[key]["result"] for key in cells}

    def stored(self) -> dict[str, dict[str, Any]]:
        """Return the last stored ``{"key", "spec", "result"}`` by key."""
        path = self.work / RESULTS_FILE
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {record["key"]: record for record in map(_parsed, lines) if record is not None}

    def store(self, record: Mapping[str, Any]) -> None:
        """Append ``{"key", "spec", "result"}`` in one write.

        A line that a crash cut off is skipped when reading.
        """
        line = f"\n{json.dumps(record)}\n".encode()
        with (self.work / RESULTS_FILE).open("ab", buffering=0) as file:
            file.write(line)

    def command(self, command: Sequence[str], folder: Path) -> float:
        """Run a command with its output in ``folder/log.txt``; return the seconds it took.

        The command and its seconds are appended to ``folder/commands.json``.

        Raises:
            CommandFailedError: If it fails; with the command and the end of its log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log, shown = folder / "log.txt", shlex.join(command)
        started = time.perf_counter()
        with log.open("ab") as file:
            file.write(f"\n$ {shown}\n".encode())
            file.flush()
            # In its own session: a terminal's interrupt reaches it once, through this process.
            process = subprocess.Popen(  # noqa: S603 - this interpreter, our own modules
                [sys.executable, *_MODULES[command[0]], *command[1:]],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=[] if self._lock < 0 else [self._lock],
            )
        self._processes.add(process)
        exit_code = process.wait()
        self._processes.discard(process)
        if exit_code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            tail = "\n  ".join(lines[-_LOG_LINES:])
            raise CommandFailedError(f"{shown}\n  exited with {exit_code}; end of {log}:\n  {tail}")
        seconds = round(time.perf_counter() - started, 1)
        done = read_json(folder / "commands.json", [])
        write_json(folder / "commands.json", [*done, {"command": shown, "seconds": seconds}])
        return seconds

    def _check_settings(self) -> None:
        path = self.work / SETTINGS_FILE
        settings = json.loads(json.dumps(self._settings))
        stored = read_json(path, None)
        if stored is None:
            write_json(path, settings)
        elif changed := [name for name in settings if stored.get(name) != settings[name]]:
            changes = "; ".join(f"{n}: {stored.get(n)!r} -> {settings[n]!r}" for n in changed)
            os.close(self._lock)
            raise ConfigurationError(
                f"--work {self.work} holds results of other settings ({changes}). Use the same "
                "settings, or choose another folder."
            )

    @contextlib.contextmanager
    def _stopping_commands(self) -> Iterator[None]:
        """On Ctrl-C or SIGTERM, let running commands save and end before this process does."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except BaseException:
            for process in list(self._processes):
                process.terminate()
                process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise ConfigurationError(f"--jobs must be at least 1, not {jobs}.")


@contextlib.contextmanager
def running_cells(
    work: str, jobs: int, run_cell: Callable[[Mapping[str, Any], Path], Result]
) -> Iterator[Callable[[Cells], dict[str, Result]]]:
    """Yield a function that computes the missing cells of a work folder and returns all results.

    `run_cell` gets a specification and the folder of the cell, in a process of several.
    """
    _check_jobs(jobs)
    with (
        Grid(work) as grid,
        # Processes run several cells: importing the libraries takes as long as a short run.
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=10) as pool,
    ):

        def compute(name: str, spec: Mapping[str, Any]) -> Result:
            try:
                return pool.submit(_in_log, run_cell, spec, grid.work.resolve() / name).result()
            except Exception as error:  # the other cells go on
                raise CommandFailedError(f"{name}: {type(error).__name__}: {error}") from error

        yield partial(grid.run, compute=compute, jobs=jobs)


def _in_log(
    run_cell: Callable[[Mapping[str, Any], Path], Result], spec: Mapping[str, Any], folder: Path
) -> Result:
    """Run a cell on one thread; append what it prints to ``log.txt``, and add its CPU seconds."""
    import torch

    torch.set_num_threads(1)
    started = time.process_time()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        (folder / "log.txt").open("a") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        result = run_cell(spec, folder)
    return {"seconds": round(time.process_time() - started, 1), **result}


def read_json(path: Path, default: Any) -> Any:
    """Return the content of a JSON file, or `default` if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def _outcomes(
    keys: Sequence[str], attempt: Callable[[str], CommandFailedError | None], jobs: int
) -> Iterator[tuple[str, CommandFailedError | None]]:
    if jobs == 1:  # in this thread: trainers install signal handlers
        yield from ((key, attempt(key)) for key in keys)
        return
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = {pool.submit(attempt, key): key for key in keys}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
