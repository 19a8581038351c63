"""What this machine offers for untrusted programs, level by level, and why not more.

::

    python -m agent_envs.sandbox

Every level is opened and tried, never guessed from settings; the settings explain what was found.
"""

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

from agent_envs.errors import SandboxError, SandboxUnavailableError
from agent_envs.sandbox.limits import Level
from agent_envs.sandbox.sandbox import open_sandbox

_SETTINGS: Final = (
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
)
"""Switches that keep user namespaces from users; a distribution has some of them."""
_CAP_SYS_ADMIN: Final = 21
_PROGRAM: Final = "import os; print(os.getuid())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found about one level."""

    level: Level
    """Which one."""
    is_offered: bool
    """Whether it was opened and has run a program."""
    reason: str
    """Why it is not offered, and what would help; empty if it is."""
    limitations: tuple[str, ...] = ()
    """What it promises less here than it could elsewhere."""


def examine() -> list[Finding]:
    """Try every level, the strongest first."""
    return [_examine(level) for level in get_args(Level)]


def facts() -> Mapping[str, str]:
    """Return what the levels depend on, as this machine has it: name -> value."""
    found = {
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "python": f"{platform.python_version()} in {sys.base_prefix}",
    }
    if sys.platform != "linux":
        return found
    found["user"] = f"{os.geteuid()} of {_count_users()} in this user namespace"
    found["CAP_SYS_ADMIN"] = "yes" if _may_administer() else "no"
    for path in map(Path, _SETTINGS):
        if path.exists():
            found[path.name] = path.read_text().strip()
    return found


def report() -> str:
    """Return all of it as text for a terminal."""
    lines = [f"{name}: {value}" for name, value in facts().items()]
    for finding in examine():
        lines.append(f"level={finding.level!r}: {'yes' if finding.is_offered else 'no'}")
        notes = (finding.reason,) if finding.reason else finding.limitations
        lines += [f"  - {note}" for note in notes]
    return "\n".join(lines)


def _examine(level: Level) -> Finding:
    try:
        with open_sandbox(level) as sandbox:
            result = sandbox.run_python(_PROGRAM)
    except (SandboxUnavailableError, SandboxError) as error:
        return Finding(level=level, is_offered=False, reason=str(error))
    if result.status != "ok":
        reason = f"a program that does nothing ended with {result.status}: {result.stderr[-300:]}"
        return Finding(level=level, is_offered=False, reason=reason)
    return Finding(level=level, is_offered=True, reason="", limitations=_limitations(level))


def _limitations(level: Level) -> tuple[str, ...]:
    if level == "container":
        return ("what holds is what the engine and its image promise",)
    notes = ["memory is counted every tenth of a second, so a flood is stopped a little late"]
    if level == "limits":
        notes.append("nothing is hidden: programs see the network and all files of this user")
    is_counted = os.geteuid() == 0 and (level == "limits" or not _may_become_nobody())
    if is_counted:
        notes.append(
            "the kernel does not limit the processes of root: they are counted, and a program "
            "that has too many is ended"
        )
    return tuple(notes)


def _may_become_nobody() -> bool:
    return _may_administer() and _count_users() > 1


def _may_administer() -> bool:
    """Return whether this process has CAP_SYS_ADMIN."""
    status = Path("/proc/self/status").read_text()
    (rights,) = (line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(rights, 16) >> _CAP_SYS_ADMIN & 1)


def _count_users() -> int:
    """Return how many user ids exist in our user namespace."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines)
