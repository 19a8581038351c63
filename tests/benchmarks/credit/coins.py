"""A task whose true advantages are known: both of two coins must show heads."""

import gymnasium as gym

import agent_envs  # noqa: F401
from agent_envs.core.spaces import UnicodeText
from agent_trainers.policies.scripted import ScriptedPolicy

# V = 1/4 at first, 1/2 after heads, 0 after tails
TRUE = {("heads",): 0.25, ("tails",): -0.25, ("heads", "heads"): 0.5, ("heads", "tails"): -0.5,
        ("tails", "heads"): 0.0, ("tails", "tails"): 0.0}  # fmt: skip


class Coins(gym.Env):
    """Shows what lies there; has no snapshots, so its states are reached by replay."""

    observation_space = action_space = UnicodeText()
    is_immediate = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.coins = []
        return "", self._info((options or {}).get("task"))

    def step(self, action):
        self.coins.append(action)
        is_over = len(self.coins) == 2
        reward = float(self.coins == ["heads", "heads"])
        info = self._info(None) | ({"metrics": {"success": reward}} if is_over else {})
        return "", reward, is_over, False, info

    def reference_actions(self):
        return ["heads", "heads"]

    def _info(self, task):
        return {
            "messages": [{"role": "user", "content": " ".join(["coins:", *self.coins])}],
            "task_id": str(task),
            "metrics": {"success": 0.0},
        }


tosser = ScriptedPolicy(lambda request: "heads" if request.rng.random() < 0.5 else "tails")
