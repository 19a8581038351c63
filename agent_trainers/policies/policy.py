"""What every policy takes and gives: a state in, one model turn out, as text and as tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_envs.core.messages import Message
from agent_trainers.trajectory import Transition

FinishReason = Literal["stop", "length", "overflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One state that wants an action."""

    messages: Sequence[Message]
    """The state."""
    tools: Sequence[dict[str, Any]] | None
    """Function schemas for the chat template; None where the state itself describes the tools."""
    previous: Transition | None
    """The step before in the same episode: its tokens are the prefix of a state that extends it."""
    rng: np.random.Generator
    """The episode's own generator; every draw of the policy comes from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What was asked of a model."""

    calls: int = 0
    """Model turns."""
    prompt_tokens: int = 0
    """Tokens of the states, each counted whenever it was sent."""
    completion_tokens: int = 0
    """Tokens that the model wrote."""

    def __add__(self, other: "Usage") -> "Usage":
        """Return both together."""
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One model turn."""

    prompt_ids: list[int]
    """Tokens of the state."""
    completion_ids: list[int]
    """Sampled tokens, the end-of-turn token included."""
    logprobs: npt.NDArray[np.float32]
    """Log-probability of each sampled token when it was sampled, shape (len(completion_ids),)."""
    text: str
    """The action: the sampled tokens as text, without special tokens."""
    finish_reason: FinishReason
    """``stop``: the model ended its turn; ``length``: it was cut off; ``overflow``: the state
    does not fit, and nothing was sampled."""
    usage: Usage | None = None
    """What the turn took, where a server counted it; None: the tokens above say it."""


class Policy(Protocol):
    """Turns states into actions, many at once."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state."""

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state; None where it does not fit."""
