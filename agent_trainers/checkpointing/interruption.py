"""Stop a run at the end of a step when it is asked to: by Ctrl-C, by a signal, by its launcher.

The first request lets the step end and saves a checkpoint; a second one stops at once. Before and
after training there is nothing to save, and the first request stops the run.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

import psutil
import torch
from transformers import TrainerCallback

STOP_FILE: Final = "AGENT_R1_STOP_FILE"
"""Environment variable: a file that the launcher of several processes writes a signal's number
into. Launchers forward signals late, twice, or not at all."""
SUPERVISOR: Final = "AGENT_R1_SUPERVISOR"
"""Environment variable: the launcher's process, without which the others are to stop as well."""
SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""What asks a run to stop: Ctrl-C, a scheduler, a terminal that is closed."""


class Interrupted(BaseException):
    """The run was asked to stop; not an ``Exception``, so that nothing takes it for a failure."""

    def __init__(self, number: int) -> None:
        """Note the signal's number."""
        super().__init__(number)
        self.exit_code = 128 + number


class StopRequests:
    """Listens for requests to stop while its block runs."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """Tell `notify` what happens now, in a sentence for a user."""
        self._notify = notify
        self._before: dict[signal.Signals, Any] = {}
        self._received: int | None = None
        self.can_finish_step = False
        """Whether training is on: then a request waits for the end of the step."""

    def __enter__(self) -> Self:
        """Listen. Only the main thread of a process may; elsewhere signals do what they did."""
        if threading.current_thread() is threading.main_thread():
            self._before = catch_signals(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def received(self) -> int | None:
        """The signal that asked to stop, if one did."""
        if self._received is None and (path := os.environ.get(STOP_FILE)):
            if Path(path).exists():
                self._received = int(Path(path).read_text(encoding="utf-8"))
            elif not psutil.pid_exists(int(os.environ[SUPERVISOR])):
                self._received = signal.SIGTERM
        return self._received

    def _receive(self, number: int, _: object) -> None:
        leave_closed_terminal(number)
        if not self.can_finish_step:
            raise Interrupted(number)
        self._received = number
        if "LOCAL_RANK" in os.environ:
            return  # a launcher may send a signal several times; it kills what does not end
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        self._notify("Stopping when the step is done and saved. Once more stops at once.")


def catch_signals(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Have `handler` called on `SIGNALS`; return what was called before.

    Not on a signal that whoever started this process ignores, as ``nohup`` does.
    """
    return {
        number: signal.signal(number, handler)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }


def leave_closed_terminal(number: int) -> None:
    """Write nothing more to a terminal that was closed: it would be an error each time."""
    if number != getattr(signal, "SIGHUP", None):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if os.isatty(stream):
            os.dup2(nowhere, stream)
    os.close(nowhere)


class StopAtStepEnd(TrainerCallback):  # type: ignore[misc]
    """Saves and stops training at the end of a step if any process was asked to stop."""

    def __init__(self, requests: StopRequests, accelerator: Any) -> None:
        """Watch `requests` in every process of `accelerator`."""
        self._requests = requests
        self._accelerator = accelerator
        self.stopped_by: int | None = None
        """The signal that training stopped for."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let the step end from now on."""
        self._requests.can_finish_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if asked to; all processes at the same step."""
        self._agree()
        if self.stopped_by is not None:
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop at once from now on; for a request that came after the last step, too."""
        self._requests.can_finish_step = False
        self._agree()

    def _agree(self) -> None:
        number = self._requests.received or 0
        if self._accelerator.num_processes > 1:
            own = torch.tensor([number], device=self._accelerator.device)
            number = int(self._accelerator.gather(own).max())
        if number:
            self.stopped_by = number
