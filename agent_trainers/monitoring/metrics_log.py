"""``metrics.jsonl``: everything the trainer logs, one JSON object a line, for any tool to read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from transformers import TrainerCallback

from agent_envs.data.files import write_text
from agent_envs.errors import DataError

METRICS_FILE: Final = "metrics.jsonl"


class MetricsLog(TrainerCallback):  # type: ignore[misc]
    """Appends to ``metrics.jsonl`` in the output folder, on the main process.

    A new run starts the file anew. A resumed one first cuts off what came after its checkpoint, so
    that no step is there twice; that is also what becomes of a line that a crash cut in half.
    """

    def __init__(self) -> None:
        """Write nothing until training begins."""
        self._path: Path | None = None
        self._early: list[str] = []  # an evaluation before training; is it a new run or a resumed?

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the file fit the state that training begins with."""
        if not state.is_world_process_zero:
            return
        self._path = Path(args.output_dir) / METRICS_FILE
        kept = [] if state.global_step == 0 else _until_checkpoint(self._path, state)
        write_text(self._path, "".join([*map(_line, kept), *self._early]))
        self._early.clear()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Append a line."""
        if not state.is_world_process_zero or not logs:
            return
        line = _line({"step": state.global_step, **logs})
        if self._path is None:
            self._early.append(line)
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            raise DataError(
                f"{self._path}: cannot be written ({error.strerror}). Has the output folder been "
                "moved or deleted, or the disk filled up? A run goes on from its last checkpoint."
            ) from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a ``metrics.jsonl``, or that of an output folder.

    It may be written meanwhile: half a line at its end is left out.

    Raises:
        DataError: If it cannot be read, or a line is no JSON object; names file and line.
    """
    path = Path(path)
    path = path / METRICS_FILE if path.is_dir() else path
    try:
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
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
                f"{path}, line {number}: is no JSON object with a number 'step' ({error!r})."
            ) from None
        records.append(record)
    return records


def _until_checkpoint(path: Path, state: Any) -> list[dict[str, Any]]:
    """Return what had been logged when the checkpoint was written.

    All of the steps before its own; of its own as much as its history knows: what a run logs after
    its last checkpoint (the summary, an evaluation at the end) has the same step.
    """
    if not path.exists():
        return []
    num_of_last = sum(entry.get("step") == state.global_step for entry in state.log_history)
    records = read_metrics(path)
    last = [record for record in records if record["step"] == state.global_step]
    return [record for record in records if record["step"] < state.global_step] + last[:num_of_last]


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _finite(value) for name, value in record.items()}) + "\n"


def _finite(value: Any) -> Any:
    """Return a value that JSON has: null for NaN and infinity, text for what is no number."""
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)  # numpy's and torch's too
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
