"""Policies that sample tokens: a chat template in front of a function that completes prompts."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch

from agent_envs.core.messages import Message
from agent_trainers.policies.models import find_model, load_model, load_tokenizer
from agent_trainers.policies.policy import (
    Generation,
    GenerationRequest,
    GenerationStream,
    Policy,
    Schemas,
)
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample
from agent_trainers.policies.slots import Finish, Prompt, SlotStream, can_serve
from agent_trainers.recipes import find_turn_length

_TINY_VOCABULARY: Final = 1000
MakeStream = Callable[[Prompt, Finish], GenerationStream]
Complete = Callable[[list[list[int]], list[np.random.Generator]], list[Completion]]


class TokenPolicy(Policy):
    """Renders states to tokens and samples completions."""

    def __init__(
        self,
        renderer: ChatRenderer,
        complete: Complete,
        *,
        eos_token_ids: Sequence[int],
        max_prompt_tokens: int,
        make_stream: MakeStream | None = None,
        settings: SamplingSettings | None = None,
    ) -> None:
        """Combine a renderer and a sampling function.

        Args:
            renderer: Renders messages to tokens.
            complete: Samples one completion per prompt; called once per `generate`, even without
                prompts, so that collective backends stay in step.
            eos_token_ids: Tokens that end a turn; a completion without one was truncated.
            max_prompt_tokens: Longest state; longer ones are an ``overflow``.
            make_stream: Makes the stream of a rollout from functions for the prompt of a request
                and the action of a completion. None for the default stream of policies.
            settings: Sampling parameters, if known.
        """
        self.sampling = settings.distribution if settings is not None else {}
        self._renderer = renderer
        self._complete = complete
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_prompt_tokens = max_prompt_tokens
        self._make_stream = make_stream

    def open_stream(self) -> GenerationStream:
        """Return the stream for the episodes of one rollout."""
        if self._make_stream is None:
            return super().open_stream()
        return self._make_stream(self.encode, self._generation)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order."""
        prompts = [self._prompt_ids(request) for request in requests]
        fitting = [i for i, prompt in enumerate(prompts) if len(prompt) <= self._max_prompt_tokens]
        completions = self._complete(
            [prompts[i] for i in fitting], [requests[i].rng for i in fitting]
        )
        sampled = dict(zip(fitting, completions, strict=True))
        return [self._generation(prompt, sampled.get(i)) for i, prompt in enumerate(prompts)]

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Count the tokens of a state."""
        return self._renderer.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        """Return the tokens of a state; None if it does not fit."""
        ids = self._prompt_ids(request)
        return ids if len(ids) <= self._max_prompt_tokens else None

    def decode(self, completion_ids: Sequence[int]) -> str:
        """Return sampled tokens as text, without special tokens."""
        return self._renderer.decode(completion_ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        """Return whether the chat template shows tools."""
        return self._renderer.shows_tools(tools)

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        return self._renderer.prompt_ids(request.messages, request.tools, request.previous)

    def _generation(self, prompt: list[int], completion: Completion | None) -> Generation:
        if completion is None:
            return Generation(text="", prompt_ids=prompt, finish_reason="overflow")
        is_finished = completion.token_ids[-1:] and completion.token_ids[-1] in self._eos_token_ids
        return Generation(
            prompt_ids=prompt,
            completion_ids=completion.token_ids,
            logprobs=completion.logprobs,
            text=self._renderer.decode(completion.token_ids),
            finish_reason="stop" if is_finished else "length",
        )


def transformers_policy(
    model: Any,
    tokenizer: Any,
    *,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_batch_size: int = 64,
    **sampling: Any,
) -> TokenPolicy:
    """Make a policy of a transformers model outside of training.

    Batches have at most `max_batch_size` prompts. `sampling` are fields of `SamplingSettings`:
    ``max_new_tokens``, and others as needed.
    """
    eos_token_ids = eos_ids(model.generation_config.eos_token_id, tokenizer)
    settings = SamplingSettings(
        eos_token_ids=eos_token_ids, pad_token_id=tokenizer.pad_token_id or 0, **sampling
    )

    def complete(prompts: list[list[int]], rngs: list[np.random.Generator]) -> list[Completion]:
        completions: list[Completion] = []
        for i in range(0, len(prompts), max_batch_size):
            j = i + max_batch_size
            completions += sample(model, prompts[i:j], rngs[i:j], settings)
        return completions

    def make_stream(prompt: Prompt, finish: Finish) -> GenerationStream:
        return SlotStream(
            lambda: nullcontext(model), prompt, finish, settings, max_slots=max_batch_size
        )

    return TokenPolicy(
        ChatRenderer(tokenizer, chat_template_kwargs),
        complete,
        eos_token_ids=eos_token_ids,
        max_prompt_tokens=context_length(model) - settings.max_new_tokens,
        make_stream=make_stream if can_serve(model, settings) else None,
        settings=settings,
    )


def load_policy(
    name: str, *, dtype: str = "auto", max_new_tokens: int | None = None, **options: Any
) -> TokenPolicy:
    """Load a model, on the accelerator if there is one, and make a policy of it.

    Args:
        name: See `find_model`.
        dtype: See `load_model`.
        max_new_tokens: Longest turn; None for the one in the model's recipe, or see `local_policy`.
        options: Options of `transformers_policy`.

    Raises:
        ConfigurationError: If the model cannot be loaded.
    """
    folder = find_model(name)
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype)
    if max_new_tokens is None and (trained_for := find_turn_length(folder)) is not None:
        max_new_tokens = trained_for.tokens
    return local_policy(model, tokenizer, max_new_tokens=max_new_tokens, **options)


def local_policy(
    model: Any, tokenizer: Any, *, max_new_tokens: int | None = None, **options: Any
) -> TokenPolicy:
    """Make a policy of a loaded model, on the accelerator if there is one; see `load_policy`.

    The default of `max_new_tokens` is 24 for a tiny vocabulary, else 512.
    """
    model.eval()
    is_tiny = model.config.get_text_config().vocab_size < _TINY_VOCABULARY
    if not is_tiny and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    max_new_tokens = max_new_tokens or (24 if is_tiny else 512)
    return transformers_policy(model, tokenizer, max_new_tokens=max_new_tokens, **options)


def eos_ids(declared: int | list[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: the tokenizer's and those the model declares."""
    ids = [declared] if isinstance(declared, int) else list(declared or ())
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))


def context_length(model: Any) -> int:
    """Return the context length of a model or a configuration."""
    config = getattr(model, "config", model).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2**20)
