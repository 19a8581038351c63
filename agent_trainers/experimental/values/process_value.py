"""Process value: a critic that predicts the outcome of an episode from an intermediate state.

The folder has the format of PPO's critic, so it can initialise ``--critic_model``, and the folder
of a run with a critic is a process value.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import torch

from agent_envs.core.rewards import StepEvent
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.collate import pad_rows
from agent_trainers.batching.micro_batch import pack
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.environments import template_tools
from agent_trainers.trainers.ppo import CRITIC_FILE, CriticModel

MAX_TOKENS: Final = 16_384
"""Largest batch in tokens, padding included."""


class ProcessValue:
    """Value of states and of actions in states, by a critic."""

    def __init__(self, critic: CriticModel, renderer: ChatRenderer) -> None:
        """Evaluate `critic` on messages rendered by `renderer`."""
        self.critic, self.tokenizer = critic.eval(), renderer.tokenizer
        self._renderer = renderer

    @classmethod
    def load(cls, folder: str | Path) -> "ProcessValue":
        """Load the folder of a trained value, or of a run with a critic.

        Raises:
            ConfigurationError: If the folder has no critic.
        """
        if not (Path(folder) / CRITIC_FILE).is_file():
            raise ConfigurationError(
                f"{folder}: no {CRITIC_FILE} found. Train a value with "
                "python -m agent_trainers.experimental.values, or pass the output folder of a run "
                "with a critic."
            )
        critic = CriticModel(str(folder))
        if torch.accelerator.is_available():
            critic.to(torch.accelerator.current_accelerator())
        return cls(critic, ChatRenderer(load_tokenizer(str(folder))))

    @torch.no_grad()
    def values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the value after the last token of each sequence."""
        found: dict[int, float] = {}
        for numbers in split_by_tokens(sequences):
            batch = [sequences[i] for i in numbers]
            values = self.critic.head(hidden_states(self.critic, batch))
            last = torch.tensor([len(sequence) - 1 for sequence in batch], device=values.device)
            found |= zip(numbers, values.gather(1, last[:, None])[:, 0].tolist(), strict=True)
        return [found[i] for i in range(len(sequences))]

    def potential(self, env: gym.Env[str, str]) -> float:
        """Return the value of the environment's current state, a potential for shaping."""
        return self.values([self._state_ids(env)])[0]

    def advantage(self, env: gym.Env[str, str], event: StepEvent) -> float:
        """Return by how much the action raised the value: a reward term (arXiv:2410.08146).

        Both values are of the state before the step, without the environment's reply. Unlike a
        potential, this term changes the optimal policy.
        """
        state = self._state_ids(env)
        before, after = self.values([state, [*state, *self._renderer.turn_ids(event.text)]])
        return after - before

    def _state_ids(self, env: gym.Env[str, str]) -> list[int]:
        info: dict[str, Any] = env.unwrapped.state  # type: ignore[attr-defined]
        return self._renderer.prompt_ids(info["messages"], template_tools(info), None)


def hidden_states(critic: CriticModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return last hidden states (B, T, H) of B right-padded sequences of at most T tokens."""
    input_ids = pad_rows(sequences).to(critic.head.linear.weight.device)
    states: torch.Tensor = critic.body(input_ids=input_ids, use_cache=False).last_hidden_state
    return states


def split_by_tokens(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the numbers of the sequences of each batch of at most `MAX_TOKENS` tokens."""
    lengths = [len(sequence) for sequence in sequences]
    return pack([0] * len(lengths), lengths, max_rows=len(lengths), max_tokens=MAX_TOKENS)
