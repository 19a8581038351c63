"""What policies take and give: a state in, one model turn out, as text and as tokens."""

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
    """One state that wants an action."""

    episode_id: int
    """Which episode asks: the place of its spec in the call of `Rollout.collect`."""
    messages: Sequence[Message]
    """The state."""
    tools: Sequence[dict[str, Any]] | None
    """Function schemas for the chat template; None where the state itself describes the tools."""
    previous: Transition | None
    """The step before in the same episode: its tokens are the prefix of a state that extends it."""
    rng: np.random.Generator
    """The episode's own generator; every draw of the policy comes from it."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    """Says of the tokens sampled so far whether the turn ends there, beside the policy's own ends.
    A policy may sample on: who asks cuts the turn."""


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
    """One model turn. A policy that knows no tokens gives the text alone."""

    text: str
    """The action: the sampled tokens as text, without special tokens."""
    prompt_ids: list[int] = field(default_factory=list)
    """Tokens of the state."""
    completion_ids: list[int] = field(default_factory=list)
    """Sampled tokens, the end-of-turn token included."""
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Log-probability of each sampled token when it was sampled, shape (len(completion_ids),)."""
    finish_reason: FinishReason = "stop"
    """``stop``: the model ended its turn; ``length``: it was cut off; ``overflow``: the state
    does not fit, and nothing was sampled."""
    usage: Usage | None = None
    """What the turn took, where a server counted it; None: the tokens above say it."""

    @property
    def spent(self) -> Usage:
        """What the turn took: as a server counted it, else by the tokens themselves."""
        if self.usage is not None:
            return self.usage
        if self.finish_reason == "overflow":
            return Usage()
        return Usage(
            calls=1,
            prompt_tokens=len(self.prompt_ids),
            completion_tokens=len(self.completion_ids),
        )
