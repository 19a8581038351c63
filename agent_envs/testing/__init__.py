"""What every environment must satisfy: the conformance kit, for anybody's environment.

One line in a test file plays an environment through all of it::

    from agent_envs.testing import check

    def test_my_env_keeps_the_contract():
        check("my_env:MyEnv-v0")

It asks only for what the environment offers: one that shows nothing but ``info["messages"]`` skips
the rest. Tools are called with nonsense, as a model would: do not point them at anything that must
not be harmed.

Whether rewards pay for detours is asked apart, since that is the author's decision::

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
