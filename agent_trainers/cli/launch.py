"""Start several processes where the options ask for them, and stop them all at the same step.

``accelerate launch`` does it on accelerators. On a CPU it silently starts a single process whatever
``--num_processes`` says, so ``torchrun`` does it there. The processes get the whole command line
and pass over what was meant for their launcher.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from accelerate import PartialState
from accelerate.commands.launch import launch_command_parser

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    SUPERVISOR,
    Interrupted,
    catch_signals,
    leave_closed_terminal,
)
from agent_trainers.cli.arguments import read_config, run_command
from agent_trainers.recipes import ACCELERATE_CONFIGS, find_settings

_CONFIG_OPTION: Final = "--accelerate_config"
_MAY_RUN_ON_CPU: Final = ("NO", "MULTI_CPU", "MULTI_GPU")
_SCRIPT: Final = "the script to launch"


def run_trainer(
    program: str,
    run: Callable[[list[str]], None],
    arguments: Sequence[str] | None,
    say: Callable[[str], None],
) -> None:
    """Run a command that trains, as `run_command`; say how a run goes on that was asked to stop."""
    # transformers 5.23 deprecates names that TRL 1.16 uses; nothing a user could act on
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
    try:
        run_command(program, run, arguments)
    except Interrupted as interrupted:
        say("Stopped. The same command with --resume goes on from the last checkpoint.")
        sys.exit(interrupted.exit_code)


def unknown_to_accelerate(options: Sequence[str]) -> list[str]:
    """Return which of some options ``accelerate launch`` does not have."""
    parser = launch_command_parser()
    parser.usage = "agent-r1-train [--option value ...]"  # its own is 200 lines
    known, unknown = parser.parse_known_args([*options, _SCRIPT])
    return unknown if known.training_script == _SCRIPT else [*unknown, known.training_script]


def launch_command(
    num_processes: int | None,
    accelerate_config: str | None,
    others: Sequence[str],
    module: str,
    arguments: Sequence[str],
) -> list[str] | None:
    """Return the command that starts the processes, or None where this process will do.

    They run `module` with `arguments`; `others` are further options of ``accelerate launch``.

    Raises:
        ConfigurationError: If the options ask for what a CPU cannot do.
    """
    is_started = "LOCAL_RANK" in os.environ or STOP_FILE in os.environ
    if is_started or (num_processes, accelerate_config, list(others)) == (None, None, []):
        return None
    if num_processes is not None and num_processes < 1:
        raise ConfigurationError(f"--num_processes must be at least 1, not {num_processes}.")
    settings = {}
    count = [] if num_processes is None else ["--num_processes", str(num_processes)]
    launch_options = [*count, *others]
    if accelerate_config is not None:
        config = find_settings(ACCELERATE_CONFIGS, accelerate_config, kind=_CONFIG_OPTION)
        settings = read_config(config, _CONFIG_OPTION)
        launch_options = ["--config_file", str(config), *launch_options]
    import torch

    if torch.accelerator.is_available():
        start = ["accelerate.commands.launch", *launch_options]
    else:
        _check_cpu_can(settings, others)
        num_processes = num_processes or int(settings.get("num_processes", 1))
        if num_processes == 1:
            return None
        start = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(num_processes)]
    return [sys.executable, "-m", *start, "--module", module, *arguments]


def _check_cpu_can(settings: dict[str, object], others: Sequence[str]) -> None:
    if others:
        raise ConfigurationError(
            f"{others[0]} needs an accelerator; on a CPU only --num_processes is supported."
        )
    if (kind := settings.get("distributed_type", "NO")) not in _MAY_RUN_ON_CPU:
        raise ConfigurationError(
            f"{_CONFIG_OPTION}: {kind} needs an accelerator. On a CPU use {_CONFIG_OPTION} ddp, or "
            "--num_processes alone."
        )


def leave_process_group() -> None:
    """Wait for the other processes and stop the group's threads; call it when no trainer is left.

    DDP's reducer holds the group as well. If it is collected last, the group dies with Python's
    lock held, and waits forever for a thread of gloo's that wants the lock to free a tensor; if it
    is not collected, such a thread aborts the process while the interpreter ends. So the trainer
    goes first, and the group, which lets go of the lock when it dies by itself, after it.
    """
    gc.collect()
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()


def supervise(command: Sequence[str], notify: Callable[[str], None]) -> int:
    """Run a launcher until it ends; return the exit code.

    torchrun passes an interrupt on, prints a traceback and kills after 30 seconds. So a launcher
    runs in a session of its own, where the terminal's interrupt does not reach it, and its
    processes learn of a request to stop from a file, which they look at after each step.
    `notify` is told what a request to stop leads to.
    """
    received: list[int] = []
    with tempfile.TemporaryDirectory(prefix="agent-r1-") as folder:
        request = Path(folder) / "stop"
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            env=os.environ | {STOP_FILE: str(request), SUPERVISOR: str(os.getpid())},
            start_new_session=True,
        )

        def receive(number: int, _: Any) -> None:
            leave_closed_terminal(number)
            received.append(number)
            if len(received) == 1:
                write_text(request, str(number))
                notify("Stopping when the step is done and saved. Once more stops at once.")
            else:
                _kill(process.pid)

        before = catch_signals(receive)
        try:
            exit_code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + received[0] if received else exit_code


def _kill(pid: int) -> None:
    """Kill a process and all it started, wherever they sit."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for member in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
