"""The process of the untrusted program, by mode.

Runs inside, after all rights were given up: standard library only. Nothing here guards anything:
the program may change all of it, and harms only itself.
"""

import ast
import atexit
import io
import json
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any, Final

from agent_envs.sandbox import judging

_CHANNEL: Final = 3
"""Descriptor of the connection to the host or the tests, in the modes that have one."""


def run(mode: str, source: str) -> int:
    """Run `source`; return the exit code.

    Args:
        mode: ``python``, ``shell``, ``session`` (calls come over the channel), ``serve`` (tests
            elsewhere then call it), or ``check`` (those tests).
        source: The program.
    """
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), "utf-8")
    sys.stdout, sys.stderr = _writer(1, "strict"), _writer(2, "backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    if mode == "shell":
        try:
            os.execv("/bin/sh", ["sh", "-c", source])  # noqa: S606 - the point of this mode
        except (OSError, ValueError) as error:
            print(f"sh: {error}", file=sys.stderr, flush=True)  # noqa: T201
            return 126
    main = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.startswith("agent_envs")]:
        del sys.modules[name]
    sys.modules["__main__"] = main
    sys.argv = ["main.py"]
    sys.path.insert(0, "")
    code = 0
    try:
        _run_python(mode, source, main.__dict__)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - untrusted code; shown to the caller
        _show(error)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads, as Python does
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001
        _show(error)
        code = code or 120
    return code


def _run_python(mode: str, source: str, namespace: dict[str, Any]) -> None:
    if mode == "check":
        verdict = judging.run_tests(source, judging.connect(_CHANNEL), namespace)
        print(f"\n{json.dumps(verdict)}", file=sys.__stdout__)
    elif mode == "session":
        _run_session(namespace)
    else:
        channel = judging.connect(_CHANNEL) if mode == "serve" else None
        _execute(source, "main.py", namespace)
        if channel is not None:
            judging.serve(channel, namespace)


def _run_session(namespace: dict[str, Any]) -> None:
    """Run each call, and reply whether it ended without an exception."""
    channel = judging.connect(_CHANNEL)
    number = 0
    while True:
        try:
            source = judging.receive(channel)
        except EOFError:
            return
        number += 1
        try:
            _execute(source, f"call {number}", namespace, show_value=True)
            is_ok = True
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001 - untrusted code; shown to the caller
            _show(error)
            is_ok = False
        sys.stdout.flush()
        sys.stderr.flush()
        judging.send(channel, is_ok)


def _execute(
    source: str, filename: str, namespace: dict[str, Any], *, show_value: bool = False
) -> None:
    """Run `source`; with `show_value`, print the value of a last expression."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    tree = ast.parse(source, filename)
    last: ast.stmt | None = tree.body[-1] if show_value and tree.body else None
    if isinstance(last, ast.Expr):
        del tree.body[-1]
    exec(compile(tree, filename, "exec"), namespace)  # noqa: S102 - the point of it all
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)  # noqa: S307
        if value is not None:
            print(repr(value))  # noqa: T201


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback, without our own frames."""
    try:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename.startswith("<agent_envs"):
            frame = frame.tb_next
        sys.stdout.flush()
        traceback.print_exception(type(error), error, frame)
        sys.stderr.flush()
    except BaseException as second:  # noqa: BLE001 - its streams or its exception are broken
        os.write(2, f"{type(error).__name__} (and {type(second).__name__})\n".encode())


def _writer(descriptor: int, errors: str) -> io.TextIOWrapper:
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", errors, newline="\n", line_buffering=descriptor == 2)
