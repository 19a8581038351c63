"""The conformance kit, for any environment.

::

    from agent_envs.testing import check

    def test_my_env_keeps_the_contract():
        check("my_env:MyEnv-v0")

Features that an environment does not offer are skipped. Tools are called with random arguments, as
by a model: use no tool that may do harm. Reward-hacking probes are separate::

    assert find_detour(play_ways(gym.make("my_env:MyEnv-v0"), seed=0)) is None
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
