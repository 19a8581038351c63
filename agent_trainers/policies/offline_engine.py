"""A policy on vLLM's offline engine, for evaluation: tokens in, tokens out.

Uses vLLM's documented interface (``LLM.generate`` on ``prompt_token_ids``). It is tested with a
fake of the package, not with the engine itself.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from agent_envs.core.lookup import require_extra
from agent_trainers.policies.local import TokenPolicy, context_length, eos_ids
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion


def vllm_policy(
    model: str,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_model_len: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> TokenPolicy:
    """Load a model into a vLLM engine and make a policy of it.

    `temperature` 0 is greedy decoding. vLLM reserves memory for a sequence of `max_model_len`
    tokens, by default the context length of the model.

    Raises:
        MissingExtraError: If vLLM is not installed.
    """
    require_extra("vllm", "The backend vllm", "vllm")
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model)
    length = max_model_len or context_length(config)
    llm = LLM(model=model, max_model_len=length)
    declared = None
    with contextlib.suppress(OSError):  # some models have no generation config
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
        return [_completion(output.outputs[0]) for output in outputs]

    return TokenPolicy(
        ChatRenderer(tokenizer, dict(chat_template_kwargs or {})),
        complete,
        eos_token_ids=eos_token_ids,
        max_prompt_tokens=length - max_new_tokens,
    )


def _completion(output: Any) -> Completion:
    token_ids = list(output.token_ids)
    logprobs = [
        entry[token].logprob for token, entry in zip(token_ids, output.logprobs, strict=True)
    ]
    return Completion(token_ids=token_ids, logprobs=np.array(logprobs, np.float32))
