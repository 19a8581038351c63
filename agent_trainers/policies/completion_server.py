"""A policy on ``vllm serve`` with token ids and log-probabilities, for rollouts beside a trainer.

(``vllm_mode: server`` of `StepGRPOTrainer` uses TRL's own client.)
"""

from typing import Any

import numpy as np

from agent_trainers.policies.local import TokenPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings
from agent_trainers.policies.served import ServerClient


class VLLMServerPolicy(TokenPolicy):
    """A chat template in front of a vLLM server; thread-safe."""

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
        """Connect to a server.

        Args:
            base_url: Address, such as ``http://gpu-node-2:8000``. Start the server with
                ``--logprobs-mode processed_logprobs``: only then are its log-probabilities those of
                the sampling distribution.
            renderer: Renders messages to tokens.
            settings: Sampling parameters.
            max_concurrency: Concurrent requests at most.
            timeout_seconds: Timeout of one completion.
            connection: ``api_key_env``, ``max_retries``: see `ServerClient`.

        Raises:
            MissingExtraError: If the library ``openai`` is not installed.
            ServerError: If there is no server, or it is not vLLM.
        """
        self.max_concurrency = max_concurrency
        self._client = ServerClient(
            f"{base_url.rstrip('/')}/v1",
            max_concurrency=max_concurrency,
            timeout_seconds=timeout_seconds,
            **connection,
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
        self._client.close()

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
