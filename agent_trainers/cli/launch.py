"""Start several processes, and stop a run at the end of a step, all processes at the same one.

``accelerate launch`` starts them on accelerators, and ``torchrun`` on a CPU, where ``accelerate
launch`` ignores ``--num_processes``. The processes get the whole command line. The first Ctrl-C or
signal lets the step finish and saves a checkpoint; the second stops at once. Outside training, the
first does.
"""

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import gather
from transformers import TrainerCallback

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.config_files import read_config
from agent_trainers.recipes import ACCELERATE_CONFIGS, find_settings

STOP_FILE: Final = "AGENT_R1_STOP_FILE"
"""Environment variable: file into which the launcher writes a signal's number. Launchers forward
signals late, twice, or not at all."""
SUPERVISOR: Final = "AGENT_R1_SUPERVISOR"
"""Environment variable: the launcher's process id; without it the processes stop."""
SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
_STOPPING: Final = "Stopping after this step and its checkpoint. Signal again to stop at once."


def launch_command(
    num_processes: int | None, accelerate_config: str | None, module: str, arguments: Sequence[str]
) -> list[str] | None:
    """Return the command that runs `module` in several processes; None if this one is enough."""
    is_started = "LOCAL_RANK" in os.environ or STOP_FILE in os.environ
    if is_started or (num_processes is None and accelerate_config is None):
        return None
    start, kind = ["accelerate.commands.launch"], "NO"
    if accelerate_config is not None:
        path = find_settings(ACCELERATE_CONFIGS, accelerate_config, kind="--accelerate_config")
        settings = read_config(path, "--accelerate_config")
        kind = settings.get("distributed_type", "NO")
        num_processes = num_processes or settings.get("num_processes")
        start += ["--config_file", str(path)]
    if num_processes is not None and num_processes < 1:
        raise ConfigurationError(f"--num_processes must be at least 1, not {num_processes}.")
    if torch.accelerator.is_available():
        start += [] if num_processes is None else ["--num_processes", str(num_processes)]
    else:
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ConfigurationError(
                f"--accelerate_config: {kind} needs an accelerator. On a CPU use "
                "--accelerate_config ddp, or --num_processes alone."
            )
        if num_processes in (None, 1):
            return None
        start = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    return [sys.executable, "-m", *start, "--module", module, *arguments]


def leave_process_group() -> None:
    """Wait for the other processes and destroy the group; call it when no trainer is left.

    The trainer's DDP reducer refers to the group and must be collected first: collected last, the
    group's destructor deadlocks with a thread of gloo that waits for Python's lock.
    """
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def supervise(command: Sequence[str], notify: Callable[[str], None]) -> int:
    """Run a launcher until it ends; return the exit code.

    On a signal, torchrun prints a traceback and kills its processes after 30 seconds. So it runs in
    its own session, which terminal signals do not reach, and its processes check a file for a
    request to stop after each step. A second signal kills them.
    """
    received: list[int] = []
    with tempfile.TemporaryDirectory(prefix="agent-r1-") as folder:
        request = Path(folder) / "stop"
        process = psutil.Popen(
            command,
            env=os.environ | {STOP_FILE: str(request), SUPERVISOR: str(os.getpid())},
            start_new_session=True,
        )

        def receive(number: int, _: Any) -> None:
            detach_closed_terminal(number)
            received.append(number)
            if len(received) == 1:
                write_text(request, str(number))
                notify(_STOPPING)
                return
            for member in [*process.children(recursive=True), process]:
                member.kill()

        with catch_signals(receive):
            exit_code: int = process.wait()
    return 128 + received[0] if received else exit_code


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__("Resume from the last checkpoint with the same command and --resume.")
        self.exit_code = 128 + number


class StopRequests(contextlib.ExitStack, TrainerCallback):  # type: ignore[misc]
    """Receives requests to stop while its block runs; a callback that saves and stops."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__()
        self._notify = notify
        self._received: int | None = None
        self.can_finish_step = False
        """Whether training runs: then a request waits for the end of the step."""
        self.stopped_by: int | None = None
        """The signal that stopped training."""

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
        self._notify(_STOPPING)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.can_finish_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if any process was asked to, all processes at the same step."""
        own = torch.tensor([self.received or 0], device=PartialState().device)
        if number := int(gather(own).max()):
            self.stopped_by = number
            control.should_save = control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop an evaluation outside training, all processes at the same batch."""
        if not self.can_finish_step and "LOCAL_RANK" in os.environ:
            own = torch.tensor([self.received or 0], device=PartialState().device)
            if number := int(gather(own).max()):
                raise Interrupted(number)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop at once from now on; also on a request after the last step."""
        self.can_finish_step = False
        self.on_step_end(args, state, control)


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
