"""Policies that sample tokens: a chat template in front of a function that completes prompts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.probe import is_tiny, supports, vocabulary_size
from agent_trainers.batching.shared_prefix import original_context
from agent_trainers.policies.guided import Guide, Guides
from agent_trainers.policies.models import check_model, load_model, load_tokenizer
from agent_trainers.policies.policy import (
    Generation,
    GenerationRequest,
    GenerationStream,
    Policy,
    Schemas,
)
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import (
    Completion,
    SamplingSettings,
    sample,
    samples_rightly,
)
from agent_trainers.policies.slots import SlotStream, can_serve
from agent_trainers.recipes import find_turn_length

Complete = Callable[[list[list[int]], list[np.random.Generator], list[Any]], list[Completion]]
"""Samples a completion for each prompt, with its generator and guide; see `start_guide`."""


class TokenPolicy(Policy):
    """Renders states to tokens and samples completions."""

    def __init__(
        self,
        renderer: ChatRenderer,
        complete: Complete,
        settings: SamplingSettings,
        *,
        max_prompt_tokens: int,
        slot_model: Callable[[], AbstractContextManager[Any]] | None = None,
        max_slots: int = 2**31,
        guides: Guides | None = None,
    ) -> None:
        """Combine a renderer and a function that samples one completion per prompt.

        `complete` is called once per `generate`, even without prompts, so that collective backends
        stay in step. States longer than `max_prompt_tokens` are an ``overflow``. Rollouts sample in
        at most `max_slots` slots of the model in the context `slot_model`, if there is one. Without
        `guides`, turns cannot follow a structural tag.
        """
        self.sampling = settings.distribution
        self._renderer, self._complete, self.settings = renderer, complete, settings
        self._max_prompt_tokens = max_prompt_tokens
        self._slot_model, self.max_slots = slot_model, max_slots
        self._guides = guides

    def open_stream(self) -> GenerationStream:
        if self._slot_model is None:
            return super().open_stream()
        return SlotStream(self, self._slot_model())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        prompts = {i: ids for i, r in enumerate(requests) if (ids := self.encode(r)) is not None}
        rngs = [requests[i].rng for i in prompts]
        guides = [self.start_guide(requests[i].guide) for i in prompts]
        completions = self._complete([*prompts.values()], rngs, guides)
        sampled = dict(zip(prompts, completions, strict=True))
        return [self.generation(prompts.get(i, []), sampled.get(i)) for i in range(len(requests))]

    def count_tokens(self, messages: Sequence[Message], tools: Schemas) -> int:
        return self._renderer.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        if request.prompt_ids is not None:
            return request.prompt_ids
        num_chars = sum(len(message["content"]) for message in request.messages)
        num_chars += len(str(request.tools or ""))
        if num_chars > self._max_prompt_tokens * self._renderer.longest_token:
            return None  # without encoding it, which could take minutes
        if request.previous is None:
            self._renderer.check_tools(request.tools)
        ids = self._renderer.prompt_ids(request.messages, request.tools, request.previous)
        return ids if len(ids) <= self._max_prompt_tokens else None

    def check_guide(self, guide: Mapping[str, Any]) -> None:
        if self._guides is None:
            super().check_guide(guide)
        self.start_guide(guide)

    def start_guide(self, guide: Mapping[str, Any] | None) -> Any:
        """Return what guides a new turn along a structural tag; None without one."""
        return self._guides.start(guide) if self._guides and guide else None

    def decode(self, completion_ids: Sequence[int]) -> str:
        return self._renderer.decode(completion_ids)

    def shows_tools(self, tools: Sequence[dict[str, Any]]) -> bool:
        return self._renderer.shows_tools(tools)

    def generation(self, prompt: list[int], completion: Completion | None) -> Generation:
        if completion is None:
            return Generation(text="", prompt_ids=prompt, finish_reason="overflow")
        last = completion.token_ids[-1:]
        is_finished = last and last[0] in self.settings.eos_token_ids
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
    max_new_tokens: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    max_batch_size: int = 64,
    **sampling: Any,
) -> TokenPolicy:
    """Make a policy of a loaded model, on the accelerator if there is one.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        max_new_tokens: Longest turn; by default 24 for a tiny vocabulary, else 512.
        chat_template_kwargs: Options of the chat template.
        max_batch_size: Most prompts of a batch.
        sampling: Further fields of `SamplingSettings`.
    """
    model.eval()
    if not is_tiny(model) and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens or default_turn_length(model),
        eos_token_ids=eos_ids(model.generation_config.eos_token_id, tokenizer),
        pad_token_id=tokenizer.pad_token_id or 0,
        **sampling,
    )

    guides = Guides(tokenizer, vocabulary_size(model), settings.eos_token_ids)

    def complete(
        prompts: list[list[int]],
        rngs: list[np.random.Generator],
        started: list[Guide | None],
    ) -> list[Completion]:
        completions: list[Completion] = []
        for i in range(0, len(prompts), max_batch_size):
            j = i + max_batch_size
            completions += sample(model, prompts[i:j], rngs[i:j], settings, started[i:j])
        return completions

    return TokenPolicy(
        ChatRenderer(tokenizer, chat_template_kwargs),
        complete,
        settings,
        max_prompt_tokens=context_length(model) - settings.max_new_tokens,
        slot_model=(lambda: nullcontext(model)) if has_slots_for(model, settings) else None,
        max_slots=max_batch_size,
        guides=guides,
    )


def load_policy(
    name: str, *, dtype: str = "auto", max_new_tokens: int | None = None, **options: Any
) -> TokenPolicy:
    """Load a model, on the accelerator if there is one, and make a policy of it.

    Args:
        name: See `check_model`.
        dtype: See `load_model`.
        max_new_tokens: Longest turn; None for the one in the model's recipe, if any.
        options: Options of `transformers_policy`.

    Raises:
        ConfigurationError: If the model cannot be loaded.
    """
    folder = check_model(name)
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype)
    if max_new_tokens is None and (trained_for := find_turn_length(folder)) is not None:
        max_new_tokens = trained_for[0]
    return transformers_policy(model, tokenizer, max_new_tokens=max_new_tokens, **options)


def has_slots_for(model: Any, settings: SamplingSettings) -> bool:
    """Return whether slots support a model; refuse one that no batch supports."""
    if can_serve(model, settings):
        return True
    if not supports(model, samples_rightly):
        raise ConfigurationError(
            f"Models of type {model.config.model_type!r} cannot be sampled in batches: padding "
            "changes their log-probabilities. Use a decoder-only language model."
        )
    return False


def eos_ids(declared: int | list[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: the tokenizer's and those the model declares."""
    ids = [declared] if isinstance(declared, int) else list(declared or ())
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))


def default_turn_length(model: Any) -> int:
    """Return the longest turn in tokens of a model or a configuration without a recipe."""
    return 24 if is_tiny(model) else 512


def context_length(model: Any) -> int:
    """Return the context length of a model or a configuration.

    With longrope it is the original one: beyond it, one long row would change all others.
    """
    config = getattr(model, "config", model).get_text_config()
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    lengths = [original_context(config), *(getattr(config, name, None) for name in names)]
    return min((int(length) for length in lengths if length), default=2**20)
