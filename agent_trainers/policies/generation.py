"""Requests and results of a policy: a state, and one model turn as text and tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agent_envs.core.messages import Message
from agent_trainers.trajectory import Transition

FinishReason = Literal["stop", "length", "overflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A state that needs an action."""

    episode_id: int
    """Index of the episode's spec in the call of `Rollout.collect`."""
    messages: Sequence[Message]
    """Messages of the state."""
    tools: Sequence[dict[str, Any]] | None
    """Function schemas for the chat template; None if the state describes the tools."""
    previous: Transition | None
    """Previous step of the episode, whose tokens are the prefix of a state that extends it."""
    rng: np.random.Generator
    """The episode's own generator, the source of all sampling."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    """Whether the turn ends after the tokens sampled so far, in addition to the policy's own ends.
    A policy may ignore it; the caller truncates the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of model calls and tokens."""

    calls: int = 0
    """Model turns."""
    prompt_tokens: int = 0
    """Tokens of the states, counted for every call."""
    completion_tokens: int = 0
    """Sampled tokens."""

    def __add__(self, other: "Usage") -> "Usage":
        """Return the sum."""
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One model turn; only `text` if the policy has no tokens."""

    text: str
    """The action: the sampled tokens as text, without special tokens."""
    prompt_ids: list[int] = field(default_factory=list)
    """Tokens of the state."""
    completion_ids: list[int] = field(default_factory=list)
    """Sampled tokens, including the end-of-turn token."""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probability of each token when it was sampled, shape (len(completion_ids),)."""
    finish_reason: FinishReason = "stop"
    """``stop``: the model ended its turn; ``length``: the turn was truncated; ``overflow``: the
    state does not fit the context, and nothing was sampled."""
    usage: Usage | None = None
    """Usage counted by a server; None to count the tokens above."""

    @property
    def spent(self) -> Usage:
        """Usage of the turn."""
        if self.usage is not None:
            return self.usage
        if self.finish_reason == "overflow":
            return Usage()
        return Usage(
            calls=1,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.completion_ids),
        )
