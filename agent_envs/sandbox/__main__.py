"""``python -m agent_envs.sandbox``: try every level of isolation here, and say which work."""

import os
import platform
import sys
from typing import get_args

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.results import Level
from agent_envs.sandbox.sandbox import open_sandbox


def report() -> str:
    """Test every level, the strongest first; return the results as text for a terminal."""
    lines = [f"{platform.platform()}, Python {platform.python_version()} in {sys.base_prefix}"]
    if sys.platform == "linux" and os.geteuid() == 0:
        lines.append("user: root, whose processes are counted because the kernel does not limit it")
    for level in get_args(Level):
        try:
            with open_sandbox(level) as sandbox:
                status = sandbox.run_python("pass").status
            lines.append(f"level={level!r}: {'yes' if status == 'ok' else f'no ({status})'}")
        except (SandboxUnavailableError, SandboxError) as error:
            lines.append(f"level={level!r}: no\n  - {error}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
