"""Policies on vLLM: its engine in this process, and its server.

Turns join and leave the batch of the engine one by one, so no episode waits for the longest turn of
the others, and several processes may share a server.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import require_extra
from agent_envs.core.model_server import MAX_REASON_CHARS, ServerClient
from agent_trainers.batching.probe import vocabulary_size
from agent_trainers.policies.guided import Guides
from agent_trainers.policies.local import TokenPolicy, default_turn_length, eos_ids
from agent_trainers.policies.models import check_model, load_tokenizer
from agent_trainers.policies.policy import GenerationStream, StreamedResult
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings
from agent_trainers.recipes import find_turn_length

LOGPROBS_MODE: Final = "processed_logprobs"
"""vLLM's mode in which log-probabilities are those of the sampling distribution."""
CPU_OPTIONS: Final = {"enforce_eager": True, "enable_chunked_prefill": False}
"""Options of vLLM on a CPU, where a seeded turn whose prompt is prefilled in parts ends the engine
("CPU Generator does not use offset", vLLM 0.30)."""


def sampling_parameters(settings: SamplingSettings) -> dict[str, Any]:
    """Return all sampling parameters by vLLM's names.

    vLLM takes missing ones from the model's ``generation_config.json``.
    """
    return {
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p or 0.0,
        "repetition_penalty": settings.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(settings.eos_token_ids),
        "logprobs": 0,  # of the sampled token only
    }


class EngineBatch:
    """Turns that are sampled together by an ``LLMEngine``; each joins and ends at any step."""

    def __init__(self, engine: Any, settings: SamplingSettings) -> None:
        self._engine, self._parameters = engine, sampling_parameters(settings)
        self.prompts: dict[int, list[int]] = {}
        """States of the running turns."""
        self._guided: set[int] = set()

    def add(self, key: int, prompt: list[int], rng: np.random.Generator, guide: str | None) -> None:
        """Start a turn; a ValueError if the engine refuses it, such as its guide."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        parameters = SamplingParams(
            **self._parameters,
            seed=int(rng.integers(2**31)),
            structured_outputs=guide and StructuredOutputsParams(structural_tag=guide),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(str(key), {"prompt_token_ids": prompt}, parameters)
        self.prompts[key] = prompt
        (self._guided.discard if guide is None else self._guided.add)(key)

    def step(self) -> list[tuple[int, list[int], Completion]]:
        """Sample the next token of each turn; return those that ended, with their states."""
        ended = []
        for output in self._engine.step():
            prompt = self.prompts.pop(key := int(output.request_id), None)
            if prompt is None:  # aborted
                continue
            token_ids = list(output.outputs[0].token_ids)
            found = zip(output.outputs[0].logprobs, token_ids, strict=True)
            logprobs = np.array([values[token].logprob for values, token in found], np.float32)
            if key in self._guided:
                logprobs[:] = np.nan  # those under the guide, which a trainer cannot compute again
            ended.append((key, prompt, Completion(token_ids=token_ids, logprobs=logprobs)))
        return ended

    def abort(self, key: int) -> None:
        """End a turn, if it is running."""
        if self.prompts.pop(key, None) is not None:
            self._engine.abort_request([str(key)])


class EngineStream(GenerationStream):
    """The turns of a rollout in the batch of the engine."""

    def __init__(self, policy: TokenPolicy, engine: Any) -> None:
        super().__init__()
        self._policy, self._batch = policy, EngineBatch(engine, policy.settings)

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._batch.prompts)

    def advance(self) -> list[StreamedResult]:
        """Admit pending requests, and sample a token for each running one."""
        ready: list[StreamedResult] = []
        for key, request in self._waiting.items():
            state, guide = self._policy.encode(request), self._policy.start_guide(request.guide)
            if state is None:
                ready.append((key, self._policy.generation([], None)))
                continue
            try:
                self._batch.add(key, state, request.rng, guide)
            except ValueError as error:
                ready.append((key, error))
        self._waiting.clear()
        if self._batch.prompts:
            for key, prompt, completion in self._batch.step():
                ready.append((key, self._policy.generation(prompt, completion)))
        return ready

    def drop(self, key: int) -> None:
        super().drop(key)
        self._batch.abort(key)

    def close(self) -> None:
        for key in [*self._batch.prompts]:
            self._batch.abort(key)


class EnginePolicy(TokenPolicy):
    """A chat template in front of vLLM's engine in this process."""

    def __init__(
        self,
        renderer: ChatRenderer,
        engine: Any,
        settings: SamplingSettings,
        *,
        max_prompt_tokens: int,
        guides: Guides,
    ) -> None:
        """Sample with `engine`, an ``LLMEngine``; see `TokenPolicy`.

        `guides` check structural tags, which the engine then follows by itself.
        """
        complete = self._complete_all
        super().__init__(renderer, complete, settings, max_prompt_tokens=max_prompt_tokens)
        self._engine, self._tags = engine, guides

    def open_stream(self) -> GenerationStream:
        return EngineStream(self, self._engine)

    def check_guide(self, guide: Mapping[str, Any]) -> None:
        self._tags.start(guide)

    def start_guide(self, guide: Mapping[str, Any] | None) -> str | None:
        return None if guide is None else json.dumps(guide)

    def _complete_all(
        self,
        prompts: list[list[int]],
        rngs: list[np.random.Generator],
        guides: list[str | None],
    ) -> list[Completion]:
        batch, completions = EngineBatch(self._engine, self.settings), {}
        for key, request in enumerate(zip(prompts, rngs, guides, strict=True)):
            batch.add(key, *request)
        while batch.prompts:
            completions.update({key: completion for key, _, completion in batch.step()})
        return [completions[key] for key in range(len(prompts))]


def load_engine_policy(
    name: str, *, dtype: str = "auto", max_new_tokens: int | None = None, **sampling: Any
) -> EnginePolicy:
    """Load a model into vLLM's engine, and make a policy of it.

    Args:
        name: See `check_model`.
        dtype: Type of the weights; ``"auto"`` for the one that they were saved in.
        max_new_tokens: Longest turn; None for the one in the model's recipe, if any.
        sampling: Further fields of `SamplingSettings`.
    """
    require_extra("vllm", "vLLM", "vllm")
    import torch
    from transformers import AutoConfig, GenerationConfig
    from vllm import LLM

    folder = check_model(name)
    tokenizer, config = load_tokenizer(folder), AutoConfig.from_pretrained(folder)
    if max_new_tokens is None and (trained_for := find_turn_length(folder)) is not None:
        max_new_tokens = trained_for[0]
    settings = SamplingSettings(
        max_new_tokens=max_new_tokens or default_turn_length(config),
        eos_token_ids=eos_ids(GenerationConfig.from_pretrained(folder).eos_token_id, tokenizer),
        **sampling,
    )
    options = {} if torch.accelerator.is_available() else CPU_OPTIONS
    saved_in = str(getattr(config, "dtype", None) or "auto").removeprefix("torch.")
    llm = LLM(
        model=folder,
        dtype=saved_in if dtype == "auto" else dtype,
        logprobs_mode=LOGPROBS_MODE,
        **options,
    )
    return EnginePolicy(
        ChatRenderer(tokenizer),
        llm.llm_engine,
        settings,
        max_prompt_tokens=llm.model_config.max_model_len - settings.max_new_tokens,
        guides=Guides(tokenizer, vocabulary_size(config), settings.eos_token_ids),
    )


class VLLMServerPolicy(TokenPolicy):
    """A chat template in front of ``vllm serve``; thread-safe."""

    def __init__(
        self,
        base_url: str,
        renderer: ChatRenderer,
        settings: SamplingSettings,
        *,
        max_prompt_tokens: int | None = None,
        max_concurrency: int = 64,
        **connection: Any,
    ) -> None:
        """Connect to a server, such as ``http://gpu-node-2:8000``; see `ServerClient`.

        Start it with ``--logprobs-mode processed_logprobs``: only then are its log-probabilities
        those of the sampling distribution. States may have `max_prompt_tokens`, by default all that
        the server takes.
        """
        self._client = ServerClient(f"{base_url.rstrip('/')}/v1", **connection)
        self.max_concurrency = max_concurrency
        model = self._client.call(self._client.api.models.list).data[0]
        max_model_length = (model.model_extra or {}).get("max_model_len")
        if max_model_length is None:
            raise self._client.error("the server does not report max_model_len; is it vLLM?")
        served = int(max_model_length) - settings.max_new_tokens
        self._body: dict[str, Any] = {
            "model": model.id,
            "n": 1,
            "return_token_ids": True,
            **sampling_parameters(settings),
        }
        super().__init__(
            renderer,
            lambda *batch: list(map(self._complete_one, *batch)),
            settings,
            max_prompt_tokens=min(served, max_prompt_tokens or served),
        )

    def close(self) -> None:
        self._client.api.close()

    def check_guide(self, guide: Mapping[str, Any]) -> None:
        """Accept every structural tag: the server reads them."""

    def start_guide(self, guide: Mapping[str, Any] | None) -> str | None:
        return None if guide is None else json.dumps(guide)

    def _complete_one(
        self, prompt: list[int], rng: np.random.Generator, guide: str | None
    ) -> Completion:
        body = {**self._body, "prompt": prompt, "seed": int(rng.integers(2**31))}
        if guide is not None:
            body["structured_outputs"] = {"structural_tag": guide}
        # Not `completions.create`, which looks at each token of the prompt in Python.
        post = self._client.api.post
        reply: Any = self._client.call(post, path="/completions", body=body, cast_to=object)
        try:
            (choice,) = reply["choices"]
            logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
            if guide is not None:
                logprobs[:] = np.nan  # those under the guide, which a trainer cannot compute again
            return Completion(token_ids=choice["token_ids"], logprobs=logprobs)
        except (LookupError, TypeError, ValueError):
            text = str(reply)[:MAX_REASON_CHARS]
            raise self._client.error(f"the reply is not a completion: {text}") from None
