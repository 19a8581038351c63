"""Process values: what a state is worth by a critic that was trained from branches.

A folder that ``agent-r1-value`` wrote holds a critic in the format of PPO's, so it is also one that
``--critic_model`` begins with; and the folder of a run with a critic is a process value.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import gymnasium as gym
import torch

from agent_envs.core.rewards import StepEvent
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.collate import pad_rows
from agent_trainers.experimental.search.search_tree import Reading
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.episode import template_tools
from agent_trainers.trainers.critic import CRITIC_FILE, CriticModel

T = TypeVar("T")

MAX_TOKENS: Final = 16_384
"""Tokens that are read at once."""
_CACHE_SIZE: Final = 4096


class ProcessValue:
    """Reads states and actions, and says what the episode is likely to come to."""

    def __init__(self, critic: CriticModel, renderer: ChatRenderer) -> None:
        """Read by `critic` what `renderer` makes of messages."""
        self.critic, self._renderer = critic.eval(), renderer
        self._of_state = functools.lru_cache(_CACHE_SIZE)(self._of_state_anew)

    @classmethod
    def load(cls, folder: str | Path) -> "ProcessValue":
        """Load what ``agent-r1-value``, or a run with a critic, left in a folder.

        Raises:
            ConfigurationError: If there is none.
        """
        if not (Path(folder) / CRITIC_FILE).is_file():
            raise ConfigurationError(
                f"{folder}: there is no {CRITIC_FILE}. Train one with agent-r1-value, or name the "
                "output folder of a run with a critic."
            )
        critic = CriticModel(str(folder))
        if torch.accelerator.is_available():
            critic.to(torch.accelerator.current_accelerator())
        return cls(critic, ChatRenderer(load_tokenizer(str(folder))))

    def read(self, readings: Sequence[Reading]) -> tuple[list[float], list[int]]:
        """Return the value of each state, or action in a state, and how many tokens it has."""
        sequences = []
        for messages, tools, action in readings:
            state = self._renderer.prompt_ids(messages, tools, None)
            ending = [] if action is None else self._renderer.turn_ids(action)
            sequences.append((*state, *ending))
        return self.values(sequences), [len(sequence) for sequence in sequences]

    @torch.no_grad()
    def values(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the value after the last token of each; equal ones are read once."""
        unique = sorted({tuple(sequence) for sequence in sequences}, key=len)
        found: dict[tuple[int, ...], float] = {}
        for batch in split_by_tokens(unique, [len(sequence) for sequence in unique]):
            values = self.critic.head(states_at_every_token(self.critic, batch))
            last = torch.tensor([len(sequence) - 1 for sequence in batch], device=values.device)
            picked = values.gather(1, last[:, None])[:, 0].tolist()
            found |= zip(batch, picked, strict=True)
        return [found[tuple(sequence)] for sequence in sequences]

    def potential(self, env: gym.Env[str, str]) -> float:
        """Return the value of the state that an environment of this package is in.

        It is a potential for `agent_envs.wrappers.potential_shaping.PotentialShaping`.
        """
        return self._of_state(_key(_state_of(env)))

    def advantage(self, env: gym.Env[str, str], event: StepEvent) -> float:
        """Return by how much the action raised the value: a reward term for ``rewards=``.

        Both values are of the state before the step, so what the environment replied plays no part
        (a process advantage, arXiv:2410.08146). Unlike a potential it changes what is best to do.
        """
        state = _state_of(env)
        (after,), _ = self.read([state._replace(action=event.text)])
        return after - self._of_state(_key(state))

    def _of_state_anew(self, key: str) -> float:
        (value,), _ = self.read([Reading(*json.loads(key))])
        return value


def states_at_every_token(critic: CriticModel, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the hidden states of B sequences of at most N tokens, (B, N, H), each after its token.

    Past the end of a sequence there is nothing to be read.
    """
    device = critic.head.linear.weight.device
    input_ids = pad_rows(sequences, multiple=1).to(device)
    states: torch.Tensor = critic.body(input_ids=input_ids, use_cache=False).last_hidden_state
    return states


def split_by_tokens(items: Sequence[T], lengths: Sequence[int]) -> Iterator[list[T]]:
    """Yield items in batches that hold `MAX_TOKENS` at most, padding included, or one item."""
    batch: list[T] = []
    longest = 0
    for item, length in zip(items, lengths, strict=True):
        longest = max(longest, length)
        if batch and (len(batch) + 1) * longest > MAX_TOKENS:
            yield batch
            batch, longest = [], length
        batch.append(item)
    if batch:
        yield batch


def _state_of(env: gym.Env[str, str]) -> Reading:
    info: dict[str, Any] = env.unwrapped.state  # type: ignore[attr-defined]
    return Reading(info["messages"], template_tools(info))


def _key(reading: Reading) -> str:
    return json.dumps(reading[:2])
