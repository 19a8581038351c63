"""Metrics of a run: ``metrics.jsonl``, means over tokens, and the seconds of each step."""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import TrainerCallback

from agent_envs.data.files import json_text, write_text
from agent_envs.errors import DataError
from agent_trainers.batching.distributed import ProcessGroup

METRICS_FILE: Final = "metrics.jsonl"


class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Appends each log entry to ``metrics.jsonl`` in the output folder, on the main process.

    A new run starts a new file. A resumed run first removes what came after its checkpoint, so that
    no step is there twice, and a line that a crash cut in half.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._early: list[str] = []  # an evaluation before training, new or resumed

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the file, or cut it to the state that training resumes from."""
        if not state.is_world_process_zero:
            return
        self._path = Path(args.output_dir) / METRICS_FILE
        kept = [] if state.global_step == 0 else _until_checkpoint(self._path, state)
        write_text(self._path, "".join([*map(_line, kept), *self._early]))
        self._early.clear()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        line = _line({"step": state.global_step, **logs})
        if self._path is None:
            self._early.append(line)
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a ``metrics.jsonl``, or that of an output folder, also while it grows.

    Raises:
        DataError: If it cannot be read or a line is not a JSON object; names file and line.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")  # the last may be incomplete
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path}: cannot be read ({reason}). Check the path.") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["step"] += 0
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{path}, line {number}: not a JSON object with a number 'step' ({error!r})."
            ) from None
        records.append(record)
    return records


def _until_checkpoint(path: Path, state: Any) -> list[dict[str, Any]]:
    """Return the records logged before a checkpoint.

    Those of its own step are as many as its history has: a run logs more of that step after it.
    """
    if not path.exists():
        return []
    num_of_last = sum(entry.get("step") == state.global_step for entry in state.log_history)
    records = read_metrics(path)
    last = [record for record in records if record["step"] == state.global_step]
    return [record for record in records if record["step"] < state.global_step] + last[:num_of_last]


def _line(record: Mapping[str, Any]) -> str:
    """Return a line of JSON; values that JSON cannot hold become text."""
    return (
        json_text(record, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)) + "\n"
    )


class RunningMeans:
    """Means and maxima over micro-batches, gathered over all processes."""

    def __init__(self, processes: ProcessGroup) -> None:
        self._processes = processes
        self._sums: dict[str, npt.NDArray[np.float32]] = {}
        self._maxima: dict[str, float] = {}

    def add(self, name: str, part: Any, whole: Any = 1.0) -> None:
        """Add to numerator and denominator of a mean."""
        sums = np.array([float(part), float(whole)], np.float32)
        self._sums[name] = self._sums.get(name, 0) + sums

    def add_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the values of the tokens in `mask` to a mean."""
        self.add(name, (values.detach() * mask).sum(), mask.sum())

    def add_maximum(self, name: str, value: float) -> None:
        self._maxima[name] = max(self._maxima.get(name, value), value)

    def gather(self) -> dict[str, float]:
        """Return the results since the last call; each process must have added the same names."""
        everyone = self._processes.all_gather_objects([(self._sums, self._maxima)])
        results = {}
        for name in self._sums:
            part, whole = np.sum([sums[name] for sums, _ in everyone], axis=0).tolist()
            results[name] = part / whole if whole else 0.0
        for name in self._maxima:
            results[name] = max(maxima[name] for _, maxima in everyone)
        self._sums, self._maxima = {}, {}
        return results


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Logs the wall-clock seconds of the parts of each optimiser step, on the main process.

    ``time/rollout_seconds``: until the last episode has ended, of which ``time/wait_seconds``
    without generation. ``time/score_seconds``: rows, log-probabilities, values and advantages.
    ``time/train_seconds``: the rest.
    """

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        """Log into `metrics`, TRL's lists of the mode ``train``."""
        self._metrics = metrics
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._generated = 0.0
        self._started: float | None = None
        self.part = "train"

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the block's seconds as `part`."""
        started, self.part = time.perf_counter(), part
        try:
            yield
        finally:
            self.part = "train"
            self._seconds[part] += time.perf_counter() - started

    def note_generation(self, seconds: float) -> None:
        """Add seconds of the rollout in which tokens were generated."""
        self._generated += seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the step so far, by part."""
        rollout, score = self._seconds["rollout"], self._seconds["score"]
        total = 0.0 if self._started is None else time.perf_counter() - self._started
        return {
            "rollout": rollout,
            "wait": max(0.0, rollout - self._generated),
            "score": score,
            "train": max(0.0, total - rollout - score),
        }

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start a step. Relies on: generation follows."""
        self._seconds.clear()
        self._generated = 0.0
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the step. Relies on: called after the optimiser step and before `log`."""
        for part, seconds in self.seconds().items():
            self._metrics[f"time/{part}_seconds"].append(seconds)
