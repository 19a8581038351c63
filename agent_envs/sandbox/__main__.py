"""``python -m agent_envs.sandbox``: report which levels of isolation this machine offers.

Every level is opened and tested, never guessed from settings; the settings explain the result.
"""

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.results import Level
from agent_envs.sandbox.sandbox import open_sandbox

_SETTINGS: Final = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
)
"""Switches that deny user namespaces; a distribution has some of them."""
_CAP_SYS_ADMIN: Final = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Test result of one level."""

    level: Level
    """Level of isolation."""
    is_offered: bool
    """Whether it was opened and ran a program."""
    notes: tuple[str, ...]
    """What it promises less here than elsewhere; or why it is not offered, and what would help."""


def examine() -> list[Finding]:
    """Test every level, the strongest first."""
    return [_examine(level) for level in get_args(Level)]


def facts() -> dict[str, str]:
    """Return properties of this machine that the levels depend on."""
    found = {
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "python": f"{platform.python_version()} in {sys.base_prefix}",
    }
    if sys.platform != "linux":
        return found
    found["user"] = f"{os.geteuid()} of {_count_users()} in this user namespace"
    found["CAP_SYS_ADMIN"] = "yes" if _may_administer() else "no"
    paths = (path for path in map(Path, _SETTINGS) if path.exists())
    return found | {path.name: path.read_text().strip() for path in paths}


def report() -> str:
    """Return all of it as text for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts().items()]
    for finding in examine():
        lines.append(f"level={finding.level!r}: {'yes' if finding.is_offered else 'no'}")
        lines += [f"  - {note}" for note in finding.notes]
    return "\n".join(lines)


def _examine(level: Level) -> Finding:
    try:
        with open_sandbox(level) as sandbox:
            result = sandbox.run_python("pass")
    except (SandboxUnavailableError, SandboxError) as error:
        return Finding(level=level, is_offered=False, notes=(str(error),))
    if result.status != "ok":
        note = f"an empty program ended with {result.status}: {result.stderr[-300:]}"
        return Finding(level=level, is_offered=False, notes=(note,))
    return Finding(level=level, is_offered=True, notes=_limitations(level))


def _limitations(level: Level) -> tuple[str, ...]:
    if level == "container":
        return ("isolation is what the engine and its image provide",)
    notes = ["memory is counted every tenth of a second, so a flood is stopped slightly late"]
    if level == "limits":
        notes.append("nothing is hidden: programs see the network and all files of this user")
    may_become_nobody = _may_administer() and _count_users() > 1
    if os.geteuid() == 0 and (level == "limits" or not may_become_nobody):
        notes.append(
            "the kernel does not limit the processes of root: they are counted, and a program "
            "with too many is ended"
        )
    return tuple(notes)


def _may_administer() -> bool:
    """Return whether this process has CAP_SYS_ADMIN."""
    status = Path("/proc/self/status").read_text()
    (rights,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(rights, 16) >> _CAP_SYS_ADMIN & 1)


def _count_users() -> int:
    """Return the number of user ids in our user namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines)


if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
