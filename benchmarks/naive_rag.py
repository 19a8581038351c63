"""Naive retrieval-augmented generation: search once with the question, then answer."""

import re
from dataclasses import replace
from typing import Any, Final

import numpy as np

from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper
from agent_trainers.policies.control_tokens import ControlTokens

_FORMAT: Final = TOOL_FORMATS["hermes"]
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG: Final = re.compile(r"</?\w+>")


class NaiveRAG(PolicyWrapper):
    """Searches with the question as it stands; what the model says next is the answer."""

    def __init__(self, model: Policy, tokenizer: Any) -> None:
        """Let `model` answer; with its tokenizer, the search becomes part of what it reads."""
        super().__init__(model)
        self._tokenizer = tokenizer
        self._control_tokens = ControlTokens(tokenizer)

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search at first; then the model reads what was found."""
        return self._search(request) if _is_asked(request) else request

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Take what was said as the answer, in the form the environment reads."""
        said = _ANSWER.search(generation.text)
        text = said.group(1) if said else _TAG.sub("", generation.text)
        return replace(generation, text=_FORMAT.write_answer(_TAG.sub("", text).strip()))

    def _search(self, request: GenerationRequest) -> Generation:
        text = _FORMAT.write_call("search", {"query": request.messages[-1]["content"]})
        ids = [*self._control_tokens.encode_text(text), self._tokenizer.eos_token_id]
        return Generation(
            prompt_ids=self.policy.encode(request) or [],
            completion_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            text=text,
        )


def _is_asked(request: GenerationRequest) -> bool:
    return not any(message["role"] == "assistant" for message in request.messages)
