"""A policy that follows a script, for tests, demonstrations and upper bounds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agent_envs.core.messages import Message
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy


class ScriptedPolicy(Policy):
    """A function of the request. Tokens are the UTF-8 bytes of the text."""

    def __init__(self, act: Callable[[GenerationRequest], str]) -> None:
        """Use `act`, which returns the text of one turn."""
        self._act = act

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        return [self._generation(request) for request in requests]

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the bytes of a state."""
        return sum(len(_tokens(message["content"])) for message in messages)

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return the bytes of a state."""
        return [token for message in request.messages for token in _tokens(message["content"])]

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return bytes as text."""
        return bytes(completion_ids).decode("utf-8", "replace")

    def _generation(self, request: GenerationRequest) -> Generation:
        text = self._act(request)
        completion_ids = _tokens(text)
        return Generation(
            text=text,
            prompt_ids=self.encode(request),
            completion_ids=completion_ids,
            logprobs=np.zeros(len(completion_ids), np.float32),
        )


def _tokens(text: str) -> list[int]:
    return list(text.encode("utf-8", "surrogatepass"))
