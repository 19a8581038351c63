"""A policy behind ``vllm serve``: token ids in; token ids and log-probabilities out.

For episodes that are played beside a trainer, and for evaluation on other machines. (What
`StepGRPOTrainer` does with ``vllm_mode: server`` goes through TRL's own client.)
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from agent_envs.errors import AgentEnvsError
from agent_trainers.policies.local import TokenPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion


class ServerError(AgentEnvsError, RuntimeError):
    """The server could not be reached, or refused."""


class VLLMServer:
    """Completes prompts on a server; may be called from many threads at once."""

    def __init__(
        self,
        base_url: str,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_concurrency: int = 64,
        timeout_seconds: float = 120.0,
    ) -> None:
        """Connect to a server.

        Args:
            base_url: Its address, as ``http://gpu-node-2:8000``. Start it with
                ``--logprobs-mode processed_logprobs``: only then are its log-probabilities those of
                the distribution that it draws from.
            max_new_tokens: Longest turn.
            temperature: 0 takes the most likely token.
            top_p: Nucleus sampling.
            top_k: 0 for all tokens.
            max_concurrency: Requests under way at once.
            timeout_seconds: Longest wait for one completion.

        Raises:
            ServerError: If there is no server.
        """
        self._url = base_url.rstrip("/")
        self._settings = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        limits = httpx.Limits(max_connections=max_concurrency)
        transport = httpx.HTTPTransport(retries=3, limits=limits)  # of connections, not of answers
        self._client = httpx.Client(transport=transport, timeout=timeout_seconds)
        self._pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="vllm-server")
        self._is_closed = threading.Event()
        model = self._call(lambda: self._client.get(f"{self._url}/v1/models"))["data"][0]
        self._settings["model"] = model["id"]
        self.max_model_length: int = int(model["max_model_len"])
        """Longest prompt and completion together, in tokens."""

    def complete(
        self, prompts: list[list[int]], rngs: list[np.random.Generator]
    ) -> list[Completion]:
        """Sample one completion per prompt; `rngs` give each request a seed of its own."""
        seeds = [int(rng.integers(2**31)) for rng in rngs]
        return list(self._pool.map(self._complete_one, prompts, seeds))

    def close(self) -> None:
        """Let no further request through; those that wait fail."""
        self._is_closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _complete_one(self, prompt: list[int], seed: int) -> Completion:
        if self._is_closed.is_set():
            raise ServerError("the connection to the server was closed.")
        body = {**self._settings, "prompt": prompt, "seed": seed}
        answer = self._call(lambda: self._client.post(f"{self._url}/v1/completions", json=body))
        choice = answer["choices"][0]
        logprobs = np.array(choice["logprobs"]["token_logprobs"], np.float32)
        return Completion(token_ids=list(choice["token_ids"]), logprobs=logprobs)

    def _call(self, request: Callable[[], httpx.Response]) -> dict[str, Any]:
        try:
            response = request()
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise ServerError(
                f"{self._url} answered {error.response.status_code}: {text}"
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self._url} cannot be reached ({error}). Is `vllm serve` up, and is the address "
                "right?"
            ) from None
        answer: dict[str, Any] = response.json()
        return answer


class VLLMServerPolicy(TokenPolicy):
    """A chat template in front of a `VLLMServer`."""

    is_concurrent = True

    def __init__(
        self, server: VLLMServer, renderer: ChatRenderer, *, eos_token_ids: Sequence[int],
        max_new_tokens: int, max_concurrency: int = 64,
    ) -> None:  # fmt: skip
        """Put a chat template in front of `server`.

        Args:
            server: Who completes prompts.
            renderer: Turns messages into tokens.
            eos_token_ids: Tokens that end a turn.
            max_new_tokens: The server's.
            max_concurrency: Requests under way at once.
        """
        super().__init__(
            renderer,
            server.complete,
            eos_token_ids=eos_token_ids,
            max_prompt_tokens=server.max_model_length - max_new_tokens,
        )
        self.max_concurrency = max_concurrency
