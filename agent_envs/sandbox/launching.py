"""How programs are started, and how our modules get into a sandbox.

Modules are sent as text over standard input. So a sandbox needs no file of ours, and neither the
command line nor a traceback shows where this package is installed.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from agent_envs.sandbox.results import Limits

BOOTSTRAP: Final = """
import json, os, sys
def read(length):
    data = b""
    while len(data) < length:
        data += os.read(0, length - len(data)) or sys.exit(70)
    return data
payload = json.loads(read(int(read(10))))
for name, source in payload["modules"]:
    module = sys.modules[name] = type(sys)(name)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(compile(source, f"<{name}>", "exec"), module.__dict__)
sys.modules[payload["main"]].main(payload["config"])
"""
ENVIRONMENT: Final = {
    "HOME": "/scratch",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # or each thread takes 64 MB of address space
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/scratch",
}
"""All the variables that a program sees."""
PYTHON_FLAGS: Final = ("-P", "-s", "-S", "-B", "-X", "utf8")
"""As ``-I -S``, but with our environment variables: they fix the order of sets for every run."""
_PACKAGE: Final = "agent_envs.sandbox"
_MODULES: Final = ("values", "judging", "program", "archive", "usage", "supervisor")


Start: TypeAlias = Callable[[Sequence[int], socket.socket, Limits], Callable[[], object]]
"""Start a supervisor, which takes its request from a socket; return a function that cleans up.

Besides its end of that socket it gets the program's descriptors after standard error, and the
limits of the program. It raises `SandboxError` if the supervisor cannot be started.
"""


def python_command() -> list[str]:
    """Return the command of the real interpreter, not of a virtual environment's link to it."""
    return [os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c", BOOTSTRAP]


def start_module(
    command: Sequence[str], module: str, config: dict[str, Any], **options: Any
) -> "subprocess.Popen[bytes]":
    """Start a command that runs `BOOTSTRAP`, and with it ``main(config)`` of one of our modules.

    Output is dropped unless `options` of `subprocess.Popen` say otherwise.
    """
    folder, names = Path(__file__).parent, dict.fromkeys([*_MODULES, module])
    modules = [["agent_envs", ""], [_PACKAGE, ""]]
    modules += [[f"{_PACKAGE}.{n}", (folder / f"{n}.py").read_text("utf-8")] for n in names]
    text = json.dumps({"main": f"{_PACKAGE}.{module}", "config": config, "modules": modules})
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    # In a session of its own: an interrupt at the terminal is for the host alone.
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, start_new_session=True, **{**quiet, **options}
    )
    assert process.stdin is not None  # noqa: S101 - it is a pipe
    with contextlib.suppress(BrokenPipeError):  # it ended; the caller notices
        process.stdin.write(f"{len(text):010d}{text}".encode())
        process.stdin.flush()
    return process


def end_process(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait for the end of a process, and kill it after `seconds`; return whether it ended alone."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
