"""How our own modules get into a sandbox: as text, over standard input.

What is inside then needs no file of ours, and neither the command line nor a traceback shows
where this package lives.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

BOOTSTRAP: Final = """
import json, os, sys
def read(length):
    data = b""
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            sys.exit(70)
        data += part
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

PYTHON_FLAGS: Final = ("-P", "-s", "-S", "-B", "-X", "utf8")
"""As ``-I -S``, but with our environment heard: it fixes the order of sets for every run."""

ENVIRONMENT: Final = {
    "HOME": "/scratch",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",  # or each thread takes 64 MB of address space
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "PYTHONHASHSEED": "0",
    "TMPDIR": "/scratch",
}
"""All the variables that a program sees."""

_PACKAGE: Final = "agent_envs.sandbox"


def python_executable() -> str:
    """Return the real interpreter, not a virtual environment's link to it."""
    return os.path.realpath(sys.executable)


def make_payload(main: str, config: dict[str, Any], extra_modules: Sequence[str] = ()) -> bytes:
    """Return what `BOOTSTRAP` reads.

    Args:
        main: The module whose ``main(config)`` runs.
        config: Its argument, JSON-able.
        extra_modules: Modules of this package needed besides the program's own.
    """
    folder = Path(__file__).parent
    judging, running = ("values", "served", "remote", "checker"), ("tree", "usage", "supervisor")
    names = (*judging, "program", *running, *extra_modules)
    modules = [["agent_envs", ""], [_PACKAGE, ""]]
    modules += [[f"{_PACKAGE}.{n}", (folder / f"{n}.py").read_text("utf-8")] for n in names]
    text = json.dumps({"main": f"{_PACKAGE}.{main}", "config": config, "modules": modules})
    return f"{len(text):010d}{text}".encode()
