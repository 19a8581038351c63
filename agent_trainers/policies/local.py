"""Policies that sample tokens: a chat template in front of a function that completes prompts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig

from agent_envs.core.lookup import require_extra
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
from agent_trainers.policies.served import ServerClient
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
        """Combine a renderer and a function that samples one completion per prompt.

        `complete` is called once per `generate`, even without prompts, so that collective backends
        stay in step. States longer than `max_prompt_tokens` are an ``overflow``. `make_stream`
        makes the stream of a rollout from functions for the prompt of a request and the action of
        a completion, if it is not the default one.
        """
        self.sampling = settings.distribution if settings is not None else {}
        self._renderer, self._complete, self._make_stream = renderer, complete, make_stream
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_prompt_tokens = max_prompt_tokens

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
    is_tiny = model.config.get_text_config().vocab_size < _TINY_VOCABULARY
    if not is_tiny and torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    eos_token_ids = eos_ids(model.generation_config.eos_token_id, tokenizer)
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens or (24 if is_tiny else 512),
        eos_token_ids=eos_token_ids,
        pad_token_id=tokenizer.pad_token_id or 0,
        **sampling,
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
        max_new_tokens: Longest turn; None for the one in the model's recipe, if any.
        options: Options of `transformers_policy`.

    Raises:
        ConfigurationError: If the model cannot be loaded.
    """
    folder = find_model(name)
    tokenizer, model = load_tokenizer(folder), load_model(folder, dtype)
    if max_new_tokens is None and (trained_for := find_turn_length(folder)) is not None:
        max_new_tokens = trained_for.tokens
    return transformers_policy(model, tokenizer, max_new_tokens=max_new_tokens, **options)


def vllm_policy(
    model: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_model_len: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenPolicy:
    """Load a model into vLLM's offline engine and make a policy of it; for evaluation.

    `temperature` 0 is greedy decoding. vLLM reserves memory for a sequence of `max_model_len`
    tokens, by default the context length of the model.
    """
    require_extra("vllm", "The backend vllm", "vllm")
    from vllm import LLM, SamplingParams

    tokenizer = load_tokenizer(model)
    length = max_model_len or context_length(AutoConfig.from_pretrained(model))
    llm = LLM(model=model, max_model_len=length)
    declared = None
    with suppress(OSError):  # some models have no generation config
        declared = GenerationConfig.from_pretrained(model).eos_token_id
    eos_token_ids = eos_ids(declared, tokenizer)

    def complete(prompts: list[list[int]], rngs: list[np.random.Generator]) -> list[Completion]:
        settings = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=int(rng.integers(2**31)),
                logprobs=0,  # of the sampled token only
                stop_token_ids=list(eos_token_ids),
            )
            for rng in rngs
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, settings, use_tqdm=False) if inputs else []
        turns = [output.outputs[0] for output in outputs]
        return [
            Completion(
                token_ids=list(turn.token_ids),
                logprobs=np.array(
                    [of[id].logprob for id, of in zip(turn.token_ids, turn.logprobs, strict=True)],
                    np.float32,
                ),
            )
            for turn in turns
        ]

    return TokenPolicy(
        ChatRenderer(tokenizer, dict(chat_template_kwargs or {})),
        complete,
        eos_token_ids=eos_token_ids,
        max_prompt_tokens=length - max_new_tokens,
    )


class VLLMServerPolicy(TokenPolicy):
    """A chat template in front of ``vllm serve``, for rollouts beside a trainer; thread-safe.

    (``vllm_mode: server`` of `StepGRPOTrainer` uses TRL's own client.)
    """

    def __init__(
        self,
        base_url: str,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        max_concurrency: int = 64,
        timeout_seconds: float = 120.0,
        **connection: Any,
    ) -> None:
        """Connect to a server, such as ``http://gpu-node-2:8000``; see `ServerClient`.

        Start it with ``--logprobs-mode processed_logprobs``: only then are its log-probabilities
        those of the sampling distribution.
        """
        self.max_concurrency, connection["timeout_seconds"] = max_concurrency, timeout_seconds
        self._client = ServerClient(
            f"{base_url.rstrip('/')}/v1", max_concurrency=max_concurrency, **connection
        )
        model = self._client.call(self._client.api.models.list).data[0]
        max_model_length = (model.model_extra or {}).get("max_model_len")
        if max_model_length is None:
            raise self._client.error("the server does not report max_model_len; is it vLLM?")
        self._body: dict[str, Any] = {
            "model": model.id,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "n": 1,
            "logprobs": 0,  # of the sampled token only
            # All of them: vLLM takes missing ones from the model's generation_config.json.
            "extra_body": {
                "top_k": settings.top_k,
                "min_p": settings.min_p or 0.0,
                "repetition_penalty": settings.repetition_penalty,
                "return_token_ids": True,
            },
        }
        super().__init__(
            renderer,
            self._complete_all,
            eos_token_ids=settings.eos_token_ids,
            max_prompt_tokens=int(max_model_length) - settings.max_new_tokens,
            settings=settings,
        )

    def close(self) -> None:
        """Close the connections; further requests fail."""
        self._client.api.close()

    def _complete_all(
        self, prompts: list[list[int]], rngs: list[np.random.Generator]
    ) -> list[Completion]:
        seeds = [int(rng.integers(2**31)) for rng in rngs]
        return self._client.map(self._complete_one, list(zip(prompts, seeds, strict=True)))

    def _complete_one(self, prompt_and_seed: tuple[list[int], int]) -> Completion:
        prompt, seed = prompt_and_seed
        reply = self._client.call(
            self._client.api.completions.create, prompt=prompt, seed=seed, **self._body
        )
        choice = reply.choices[0]
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is None or choice.logprobs is None:
            raise self._client.error("the reply lacks token_ids or logprobs; is it a recent vLLM?")
        logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
        return Completion(token_ids=list(token_ids), logprobs=logprobs)


def eos_ids(declared: int | list[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a turn: the tokenizer's and those the model declares."""
    ids = [declared] if isinstance(declared, int) else list(declared or ())
    return tuple(dict.fromkeys([tokenizer.eos_token_id, *ids]))


def context_length(model: Any) -> int:
    """Return the context length of a model or a configuration."""
    config = getattr(model, "config", model).get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 2**20)
