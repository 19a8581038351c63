"""Naive retrieval-augmented generation: search once with the question, then answer."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy

_FORMAT: Final = TOOL_FORMATS["hermes"]
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG: Final = re.compile(r"</?\w+>")


class NaiveRAG:
    """Searches with the question as it stands; what the model says next is the answer."""

    def __init__(self, model: Policy, tokenizer: Any) -> None:
        """Let `model` answer.

        Args:
            model: Who answers.
            tokenizer: Its tokenizer: the search becomes part of what it reads.
        """
        self._model, self._tokenizer = model, tokenizer

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        reading = [request for request in requests if not _is_asked(request)]
        answers = iter(self._model.generate(reading))
        return [
            self._search(request) if _is_asked(request) else _as_answer(next(answers))
            for request in requests
        ]

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Count the tokens of a state."""
        return self._model.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state; None where it does not fit."""
        return self._model.encode(request)

    def _search(self, request: GenerationRequest) -> Generation:
        text = _FORMAT.write_call("search", {"query": request.messages[-1]["content"]})
        ids = self._tokenizer(text + self._tokenizer.eos_token).input_ids
        return Generation(
            prompt_ids=self._model.encode(request) or [],
            completion_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            text=text,
            finish_reason="stop",
        )


def _is_asked(request: GenerationRequest) -> bool:
    return not any(message["role"] == "assistant" for message in request.messages)


def _as_answer(generation: Generation) -> Generation:
    """Take what was said as the answer, in the form the environment reads."""
    said = _ANSWER.search(generation.text)
    text = said.group(1) if said else _TAG.sub("", generation.text)
    return replace(generation, text=_FORMAT.write_answer(_TAG.sub("", text).strip()))
