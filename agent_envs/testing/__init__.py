"""The conformance kit, for any environment: `check` in a test, or ``python -m agent_envs check``.

Tools are called with random arguments, as by a model: use no tool that may do harm. `play_ways`
runs probes for reward hacking, and `find_detour` finds one that pays.
"""

from agent_envs.errors import ConformanceError
from agent_envs.testing.checks import Result, check, run_checks
from agent_envs.testing.ways import Play, find_detour, play_ways

__all__ = [
    "ConformanceError",
    "Play",
    "Result",
    "check",
    "find_detour",
    "play_ways",
    "run_checks",
]
