"""skyrl-gym: our environments in ``skyrl_gym.make``, and its environments as ours.

SkyRL appends observations to the prompt of the row, which ``init`` returns. It has one flag for the
end of an episode; the step's ``metadata`` distinguishes the two kinds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError


class OwnEnv(BaseTextEnv):
    """An environment of ours as one of skyrl-gym's, for one episode."""

    def __init__(
        self,
        id: str,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the environment as ``gymnasium.make(id, **env_config)`` does.

        `extras` is the row of the data, with ``task`` and ``seed``.
        """
        super().__init__()
        self._episode = OwnEpisode(id, dict(env_config or {}), only_text_in="SkyRL")
        self._row = extras or {}

    def init(self, prompt: Any) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Begin the row's episode; return its prompt instead of `prompt`."""
        task, seed = self._row.get("task"), self._row.get("seed")
        if task is None and seed is None:
            raise ConfigurationError(
                "The row has neither 'task' nor 'seed', so the members of a group would get "
                "different tasks. task_rows() makes rows with both."
            )
        self._episode.reset(seed=seed, task=task)
        self.max_turns = self._episode.env.unwrapped.max_turns  # type: ignore[attr-defined]
        self.turns = 0
        return self._episode.messages, {"task_id": self._episode.info["task_id"]}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        episode = self._episode
        episode.step(action)
        self.turns = episode.num_turns
        return BaseTextEnvStepOutput(
            observations=episode.replies,
            reward=episode.reward,
            done=episode.is_over,
            metadata=episode.summary,
        )

    def get_metrics(self) -> dict[str, float]:
        """Return the episode's metrics, and the sum of each reward term as ``rewards/<term>``."""
        return self._episode.totals

    def close(self) -> None:
        self._episode.close()


class SkyRLGymEnv(ForeignEnv):
    """An environment of skyrl-gym as one of ours. A task is a row of its data."""

    def __init__(
        self, *, env_id: str, rows: Sequence[Mapping[str, Any]], env_config: Any = None
    ) -> None:
        """Keep the rows; each episode makes an environment.

        Args:
            env_id: Its id, as for ``skyrl_gym.make``.
            rows: SkyRL's training data: ``prompt``, a list of messages, and the fields that the
                environment reads, such as ``reward_spec``.
            env_config: SkyRL's settings of the environment.
        """
        super().__init__(env_id)
        if not rows or not all(row.get("prompt") for row in rows):
            raise ConfigurationError("rows= need a 'prompt' each, a list of messages.")
        self._rows, self._env_config = rows, env_config
        self.num_tasks = len(rows)
        self._env: Any = None

    def begin(self, task: int) -> list[Message]:
        self.close()
        row = dict(self._rows[task])
        prompt = [dict(message) for message in row.pop("prompt")]
        self._env = skyrl_gym.make(self._name, env_config=self._env_config, extras=row)
        return list(self._env.init(prompt)[0])

    def act(self, action: str) -> Reply:
        """Take one model turn; skyrl-gym's one flag for the end counts as terminated."""
        step = self._env.step(action)
        is_over = bool(step["done"])
        metrics = self._env.get_metrics() if is_over else {}
        return Reply(
            text="\n\n".join(str(message["content"]) for message in step["observations"] or ()),
            reward=float(step["reward"]),
            terminated=is_over,
            action=step.get("postprocessed_action"),
            metrics={k: float(v) for k, v in metrics.items() if isinstance(v, int | float)},
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def task_rows(
    id: str, /, num_tasks: int | None = None, seed: int = 0, **kwargs: Any
) -> list[dict[str, Any]]:
    """Make SkyRL's training data: rows with ``prompt``, ``env_class``, ``task`` and ``seed``."""
    episode = OwnEpisode(id, kwargs)
    rows = []
    for task, task_seed in draw_tasks(id, episode.env, num_tasks, seed):
        episode.reset(seed=task_seed, task=task)
        row = {"prompt": episode.messages, "env_class": id, "task": task, "seed": task_seed}
        rows.append(row)
    episode.close()
    return rows


def register(*ids: str) -> None:
    """Register environments of ours with skyrl-gym, under their Gymnasium ids."""
    for id in ids:
        if id not in skyrl_gym.registry:
            skyrl_gym.register(id, f"{__name__}:OwnEnv", kwargs={"id": id})


gym.register(
    "AgentR1/SkyRLGym-v0", f"{__name__}:SkyRLGymEnv", order_enforce=False, disable_env_checker=True
)
