"""Watch over several processes of one run, so that Ctrl-C stops them all at the same step.

A launcher such as torchrun passes an interrupt on, prints a traceback and kills after 30 seconds.
So it runs in a session of its own, where the terminal's interrupt does not reach it, and its
processes learn of a request from a file, which they look at after each step.
"""

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from agent_envs.data.files import write_text
from agent_trainers.checkpointing.interruption import SIGNALS, STOP_FILE, SUPERVISOR


def supervise(command: Sequence[str], notify: Callable[[str], None]) -> int:
    """Run a launcher until it ends; return the exit code.

    Args:
        command: The launcher with its arguments.
        notify: Told what a request to stop leads to.
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
            received.append(number)
            if len(received) == 1:
                write_text(request, str(number))
                notify("Stopping when the step is done and saved. Once more stops at once.")
            else:
                _kill(process.pid)

        before = {number: signal.signal(number, receive) for number in SIGNALS}
        try:
            exit_code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 128 + received[0] if received else exit_code


def _kill(pid: int) -> None:
    """Kill a process and all it started, wherever they sit."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
