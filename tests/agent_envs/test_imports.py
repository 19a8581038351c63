import subprocess
import sys

HEAVY = ("torch", "transformers", "trl", "pandas", "sklearn", "datasets", "pyarrow")
PROGRAM = """
import sys, gymnasium as gym, agent_envs
env = gym.make("AgentR1/SyntheticMultiHop-v0")
env.reset(seed=0)
print([name for name in {heavy} if name in sys.modules])
"""


def test_importing_and_making_an_environment_loads_nothing_heavy():
    program = PROGRAM.format(heavy=HEAVY)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "[]"
