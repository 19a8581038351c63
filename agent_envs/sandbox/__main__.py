"""``python -m agent_envs.sandbox``: report which levels of isolation this machine offers.

Every level is opened and tested, never guessed from settings; the settings explain the result.
"""

import os
import platform
import sys
from pathlib import Path
from typing import Final, get_args

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.results import Level
from agent_envs.sandbox.sandbox import open_sandbox

_SETTINGS: Final = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/self/uid_map",
)
"""Settings that deny or limit user namespaces; a distribution has some of them."""
_NOTES: Final = {
    "strong": "memory is counted every tenth of a second, so a flood is stopped slightly late",
    "container": "isolation is what the engine and its image provide",
    "limits": "nothing is hidden: programs see the network and all files of this user",
}


def try_level(level: Level) -> str:
    """Open a level and run an empty program; return the error, empty if there is none."""
    try:
        with open_sandbox(level) as sandbox:
            result = sandbox.run_python("pass")
    except (SandboxUnavailableError, SandboxError) as error:
        return str(error)
    if result.status != "ok":
        return f"an empty program ended with {result.status}: {result.stderr[-300:]}"
    return ""


def report() -> str:
    """Test every level, the strongest first; return the results as text for a terminal."""
    lines = [
        f"system: {platform.system()} {platform.release()} on {platform.machine()}",
        f"python: {platform.python_version()} in {sys.base_prefix}",
    ]
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text().splitlines()
        lines += [f"user: {os.geteuid()}", *(line for line in status if line.startswith("CapEff"))]
        settings = (path for path in map(Path, _SETTINGS) if path.exists())
        lines += [f"{path.name}: {' '.join(path.read_text().split())}" for path in settings]
    for level in get_args(Level):
        error = try_level(level)
        lines += [f"level={level!r}: {'no' if error else 'yes'}", f"  - {error or _NOTES[level]}"]
        if level == "limits" and sys.platform == "linux" and os.geteuid() == 0:
            lines.append("  - the kernel does not limit the processes of root: they are counted")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
