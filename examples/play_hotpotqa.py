"""Play one HotpotQA question by its reference actions and see every reward term.

Usage: ``python examples/play_hotpotqa.py hotpotqa.jsonl`` with a file of HotpotQA rows, in the
form of the hub's ``hotpotqa/hotpot_qa`` or of the original release.
"""

import sys

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments

if len(sys.argv) != 2:
    sys.exit(__doc__)

env = gym.make("AgentR1/HotpotQA-v0", data=sys.argv[1])
observation, info = env.reset(seed=7)
print(f"question: {observation}\n")

# An agent would write these texts; `info["messages"]` is the state that it sees.
for action in env.unwrapped.reference_actions():
    observation, reward, terminated, truncated, info = env.step(action)
    print(f"action:   {action}")
    print(f"          {observation[:300]}")
    print(f"reward:   {reward:.2f} = {info['reward_terms']}\n")

print(f"metrics:  {info['metrics']}")
