"""Do the cells of the table, one after the other, so that a killed command loses next to nothing.

A cell is a folder. Each of its steps leaves a file when it is done and is not done again; training
goes on from its last checkpoint.
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.interruption import SIGNALS, Interrupted
from agent_trainers.monitoring.metrics_log import METRICS_FILE, read_metrics
from agent_trainers.trajectory import Trajectory, load_trajectories
from benchmarks.papers_real.cells import Cell, Commands, in_this_interpreter
from benchmarks.papers_real.questions import TEST_SETS

RESULT_FILE: Final = "result.json"
_METRICS: Final = ("exact_match", "f1", "gold_passage_recall", "num_tool_calls")
_LOG_LINES: Final = 5


class CommandFailedError(ConfigurationError):
    """A command of a cell ended with an error."""


class Runner:
    """Runs the commands of one working folder, and no other call beside it."""

    def __init__(self, commands: Commands) -> None:
        """Run these commands."""
        self._commands = commands
        self._lock: int | None = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other calls out of the folder while the block runs.

        The lock is the operating system's, and commands inherit it: one that outlives a killed
        call still holds it.

        Raises:
            ConfigurationError: If another call is at work there, or a command that it left.
        """
        self._commands.work.mkdir(parents=True, exist_ok=True)
        with (self._commands.work / ".lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigurationError(
                    f"--work {self._commands.work}: another call works there, or a command that "
                    "a killed one left. Wait for it or stop it, or choose another folder."
                ) from None
            self._lock = file.fileno()
            yield

    def is_done(self, cell: Cell) -> bool:
        """Return whether a cell has its result."""
        result = _read(self._commands.work / cell.folder / RESULT_FILE, {"scores": {}})
        return set(result["scores"]) == set(TEST_SETS)

    def do(self, cell: Cell) -> None:
        """Do what is missing of a cell.

        Raises:
            CommandFailedError: If a command fails; names it and its log.
            Interrupted: If the call was asked to stop.
        """
        folder = self._commands.work / cell.folder
        curve: list[dict[str, float]] = []
        if cell.row.kind == "naive_rag":
            command, spec = self._commands.naive_rag(folder)
            write_json(folder / "run.json", spec)
            self._run(command, folder)
        else:
            model: Path | str = self._commands.model
            if cell.row.kind != "base":
                model = folder / "model"
                curve = self._train(cell, folder)
            for name in TEST_SETS:
                if not (episodes := folder / f"{name}.jsonl.gz").exists():
                    self._run(self._commands.test(model, name, episodes), folder)
                write_json(folder / RESULT_FILE, _result(cell, folder, curve))
        write_json(folder / RESULT_FILE, _result(cell, folder, curve))

    def _train(self, cell: Cell, folder: Path) -> list[dict[str, float]]:
        if cell.row.kind == "warm_start":
            if not (done := folder / "trained.json").exists():
                self._run(self._commands.warm_up(folder), folder)
                write_json(done, {})
            return []
        rounds = _read(folder / "rounds.json", [])
        while (max_steps := self._commands.next_length(rounds)) is not None:
            self._run(self._commands.train(cell, folder, max_steps), folder)
            curve = self._learning_curve(folder / "model")
            rounds.append({"max_steps": max_steps, **curve[-1]})
            write_json(folder / "rounds.json", rounds)
        return self._learning_curve(folder / "model")

    def _learning_curve(self, folder: Path) -> list[dict[str, float]]:
        """Return environment steps so far, and what a batch scored, after each optimiser step."""
        curve: list[dict[str, float]] = []
        num_steps = 0.0
        for entry in read_metrics(folder / METRICS_FILE):
            if "episodes/mean_turns" in entry:
                num_steps += entry["episodes/mean_turns"] * self._commands.batch_size
                shown = {name: entry.get(f"metrics/{name}", 0.0) for name in _METRICS}
                curve.append({"environment_steps": round(num_steps), **shown})
        return curve

    def _run(self, command: Sequence[str], folder: Path) -> None:
        """Run a command to its end, its output in ``log.txt``; note it and its seconds."""
        folder.mkdir(parents=True, exist_ok=True)
        log, shown = folder / "log.txt", shlex.join(command)
        started = time.perf_counter()
        with log.open("ab") as file:
            file.write(f"\n$ {shown}\n".encode())
            file.flush()
            # In a session of its own: a terminal's interrupt reaches it once, through us.
            process = subprocess.Popen(  # noqa: S603 - this interpreter, our own modules
                in_this_interpreter(command),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=[] if self._lock is None else [self._lock],
            )
            with _signals_passed_on(process) as received:
                exit_code = process.wait()
        if received:
            raise Interrupted(received[0])
        if exit_code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            tail = "\n  ".join(lines[-_LOG_LINES:])
            raise CommandFailedError(f"{shown}\n  ended with {exit_code}; {log} ends:\n  {tail}")
        done = _read(folder / "commands.json", [])
        seconds = round(time.perf_counter() - started, 1)
        write_json(folder / "commands.json", [*done, {"command": shown, "seconds": seconds}])


@contextlib.contextmanager
def _signals_passed_on(process: "subprocess.Popen[bytes]") -> Iterator[list[int]]:
    """Hand requests to stop on to a process while the block runs; yield those received."""
    received: list[int] = []

    def receive(number: int, _: Any) -> None:
        received.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _result(cell: Cell, folder: Path, curve: Sequence[dict[str, float]]) -> dict[str, Any]:
    commands = _read(folder / "commands.json", [])
    return {
        "row": cell.row.name,
        "seed": cell.seed,
        "scores": {
            name: _scores(load_trajectories(path))
            for name in TEST_SETS
            if (path := folder / f"{name}.jsonl.gz").exists()
        },
        "environment_steps": curve[-1]["environment_steps"] if curve else 0,
        "curve": list(curve),
        "form": _read(folder / "form.json", None),
        "commands": commands,
        "seconds": round(sum(each["seconds"] for each in commands), 1),
    }


def _scores(episodes: Sequence[Trajectory]) -> dict[str, list[float]]:
    """Return each metric by task, and the tokens of the episodes; one not scored earns nothing."""
    return {
        **{name: [e.metrics.get(name, 0.0) for e in episodes] for name in _METRICS},
        "num_turns": [float(len(e.transitions)) for e in episodes],
        "num_tokens": [float(_num_tokens(e)) for e in episodes],
    }


def _num_tokens(episode: Trajectory) -> int:
    last = episode.transitions[-1] if episode.transitions else None
    return len(last.prompt_ids) + len(last.completion_ids) if last else 0


def _read(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default
