"""Start several processes and stop them all at the same step.

``accelerate launch`` starts them on accelerators, and ``torchrun`` on a CPU, where ``accelerate
launch`` ignores ``--num_processes``. The processes get the whole command line.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from accelerate import PartialState

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    SUPERVISOR,
    catch_signals,
    detach_closed_terminal,
)
from agent_trainers.cli.arguments import read_config
from agent_trainers.recipes import ACCELERATE_CONFIGS, find_settings


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
    import torch

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
                notify("Stopping after this step and its checkpoint. Signal again to stop at once.")
                return
            for member in [*process.children(recursive=True), process]:
                member.kill()

        with catch_signals(receive):
            exit_code: int = process.wait()
    return 128 + received[0] if received else exit_code
