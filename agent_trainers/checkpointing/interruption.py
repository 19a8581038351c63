"""Stop a run at the end of a step on Ctrl-C, a signal, or a request of its launcher.

The first request lets the step finish and saves a checkpoint; the second stops at once. Outside
training, the first does.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Self

import psutil
import torch
from transformers import TrainerCallback

STOP_FILE: Final = "AGENT_R1_STOP_FILE"
"""Environment variable: file into which the launcher writes a signal's number. Launchers forward
signals late, twice, or not at all."""
SUPERVISOR: Final = "AGENT_R1_SUPERVISOR"
"""Environment variable: the launcher's process id; without it the processes stop."""
SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop."""

    def __init__(self, number: int) -> None:
        """Take the signal's number."""
        super().__init__("Resume from the last checkpoint with the same command and --resume.")
        self.exit_code = 128 + number


class StopRequests(contextlib.ExitStack):
    """Receives requests to stop while its block runs."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        """Print what happens next through `notify`."""
        super().__init__()
        self._notify = notify
        self._received: int | None = None
        self.can_finish_step = False
        """Whether training runs: then a request waits for the end of the step."""

    def __enter__(self) -> Self:
        """Install the handlers, which only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            self.enter_context(catch_signals(self._receive))
        return self

    @property
    def received(self) -> int | None:
        """The signal that asked to stop, if any."""
        if self._received is None and (path := os.environ.get(STOP_FILE)):
            if Path(path).exists():
                self._received = int(Path(path).read_text(encoding="utf-8"))
            elif not psutil.pid_exists(int(os.environ[SUPERVISOR])):
                self._received = signal.SIGTERM
        return self._received

    def _receive(self, number: int, _: object) -> None:
        detach_closed_terminal(number)
        if not self.can_finish_step:
            raise Interrupted(number)
        self._received = number
        if "LOCAL_RANK" in os.environ:
            return  # a launcher may send a signal several times
        for other in SIGNALS:
            if signal.getsignal(other) == self._receive:
                signal.signal(other, signal.SIG_DFL)
        self._notify("Stopping after this step and its checkpoint. Signal again to stop at once.")


@contextlib.contextmanager
def catch_signals(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle `SIGNALS` in a block, except those that are ignored (``nohup``)."""
    numbers = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def detach_closed_terminal(number: int) -> None:
    """On SIGHUP, redirect output to the null device: writing to a closed terminal fails."""
    if number == getattr(signal, "SIGHUP", None):
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            if os.isatty(stream):
                os.dup2(null, stream)


class StopAtStepEnd(TrainerCallback):  # type: ignore[misc]
    """Saves and stops at the end of a step if any process was asked to stop."""

    def __init__(self, requests: StopRequests, accelerator: Any) -> None:
        """Watch `requests` in every process of `accelerator`."""
        self._requests, self._accelerator = requests, accelerator
        self.stopped_by: int | None = None
        """The signal that stopped training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Let steps finish from now on."""
        self._requests.can_finish_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if asked to, all processes at the same step."""
        own = torch.tensor([self._requests.received or 0], device=self._accelerator.device)
        if number := int(self._accelerator.gather(own).max()):
            self.stopped_by = number
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop at once from now on; also on a request after the last step."""
        self._requests.can_finish_step = False
        self.on_step_end(args, state, control)
