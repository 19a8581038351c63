"""A policy on a served model: any server with OpenAI's chat completions.

Retries with back-off, time limits and connections are the ``openai`` library's.
"""

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final

import numpy as np

from agent_envs.core.contexts import estimate_tokens
from agent_envs.core.extras import require_extra
from agent_envs.core.lookup import lookup
from agent_envs.core.messages import Message
from agent_envs.core.openai_format import FunctionCall
from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_envs.errors import ConfigurationError, ServerError
from agent_trainers.policies.chat_messages import action_text, native_messages, text_messages
from agent_trainers.policies.policy import FinishReason, Generation, GenerationRequest, Usage

DEFAULT_API_KEY_ENV: Final = "OPENAI_API_KEY"
_NO_KEY: Final = "none"
"""Sent where there is no key; servers of one's own want none, and the library wants some."""
_TOO_LONG: Final = re.compile(
    r"context[ _](length|size|window)|max_model_len|too many (input )?tokens"
    r"|(prompt|input) is too long",
    re.IGNORECASE,
)
_MAX_REASON_CHARS: Final = 500


class OpenAIPolicy:
    """Asks an OpenAI-compatible server for each turn. For evaluation only.

    A server gives no token ids and no log-probabilities of what it sampled, so generations hold
    none, and nothing can be trained on them: trainers have policies of their own.
    """

    is_concurrent: ClassVar[bool] = True
    """``generate`` may be called from many threads at once."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        tool_format: str = "hermes",
        api_key_env: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_concurrency: int = 16,
        timeout_seconds: float = 300.0,
        max_retries: int = 6,
    ) -> None:
        """Ask `model` at `base_url`.

        Args:
            base_url: Where the API begins, such as ``http://localhost:8000/v1``.
            model: The name under which the server knows the model.
            tool_format: The environment's tool format. With ``openai`` the server is told of the
                tools and the model calls them natively; with every other format calls are text.
            api_key_env: Environment variable that holds the key; ``OPENAI_API_KEY`` if not given,
                and no key if that one is not set.
            max_new_tokens: Longest turn.
            temperature: 0 takes the most likely token.
            top_p: Nucleus sampling.
            max_concurrency: Requests under way at once, at most.
            timeout_seconds: How long one request may take.
            max_retries: How often a request is sent again after a fault of the server or the
                network: no connection, no answer in time, status 408, 409, 429, 500 and above.

        Raises:
            MissingExtraError: If the library ``openai`` is not installed.
            UnknownNameError: If there is no such tool format.
            ConfigurationError: If the variable is not set, or a number is out of range.
        """
        require_extra("openai", "A served model", "openai")
        import openai

        lookup(TOOL_FORMATS, tool_format, kind="tool format")
        if max_concurrency < 1 or max_new_tokens < 1:
            raise ConfigurationError(
                f"max_concurrency ({max_concurrency}) and max_new_tokens ({max_new_tokens}) must "
                "be at least 1."
            )
        self.model = model
        self.base_url = base_url
        self.max_concurrency = max_concurrency
        self._tool_format = tool_format
        self._key = _api_key(api_key_env)
        self._sampling: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        self._client = openai.OpenAI(
            base_url=base_url,
            api_key=self._key,
            timeout=timeout_seconds,
            max_retries=max_retries,
        )
        self._slots = threading.BoundedSemaphore(max_concurrency)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order.

        Raises:
            ServerError: If the server fails after all retries, or refuses a request.
        """
        if len(requests) <= 1:
            return [self._turn(request) for request in requests]
        workers = min(len(requests), self.max_concurrency)
        with ThreadPoolExecutor(workers, thread_name_prefix="openai") as pool:
            return list(pool.map(self._turn, requests))

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        """Estimate the tokens of a state; only the server knows."""
        return estimate_tokens(messages)

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return no tokens: only the server knows them."""
        return []

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _turn(self, request: GenerationRequest) -> Generation:
        import openai

        seed = int(request.rng.integers(2**31))
        try:
            with self._slots:
                reply = self._client.chat.completions.create(
                    model=self.model, seed=seed, **self._sampling, **self._conversation(request)
                )
        except openai.APIStatusError as error:
            if error.status_code in (400, 413, 422) and _TOO_LONG.search(_reason(error)):
                return _generation("", "overflow", Usage())
            raise self._error(f"status {error.status_code}: {_reason(error)}") from None
        except openai.APITimeoutError:
            raise self._error(f"no answer within {self._client.timeout:g} seconds") from None
        except (openai.APIError, ValueError) as error:
            raise self._error(f"{type(error).__name__}: {error}") from None
        return self._read(reply)

    def _conversation(self, request: GenerationRequest) -> dict[str, Any]:
        if self._tool_format != "openai":
            return {"messages": text_messages(request.messages, request.tools)}
        messages = {"messages": native_messages(request.messages)}
        if not request.tools:
            return messages
        return messages | {"tools": list(request.tools), "parallel_tool_calls": False}

    def _read(self, reply: Any) -> Generation:
        # The library checks nothing: a proxy's error page comes as a string.
        if not getattr(reply, "choices", None) or reply.choices[0].message is None:
            raise self._error(f"the reply is no chat completion: {str(reply)[:_MAX_REASON_CHARS]}")
        choice = reply.choices[0]
        calls = [
            FunctionCall(name=call.function.name or "", arguments=call.function.arguments or "")
            for call in choice.message.tool_calls or ()
            if getattr(call, "function", None) is not None
        ]
        counted = reply.usage
        usage = Usage(
            calls=1,
            prompt_tokens=counted.prompt_tokens if counted else 0,
            completion_tokens=counted.completion_tokens if counted else 0,
        )
        text = action_text(choice.message.content or "", calls, self._tool_format)
        return _generation(text, "length" if choice.finish_reason == "length" else "stop", usage)

    def _error(self, what: str) -> ServerError:
        if self._key != _NO_KEY:
            what = what.replace(self._key, "…")  # some servers quote the key that they refuse
        return ServerError(f"{self.base_url}, model {self.model!r}: {what}")


def _generation(text: str, finish_reason: FinishReason, usage: Usage) -> Generation:
    return Generation(
        prompt_ids=[],
        completion_ids=[],
        logprobs=np.zeros(0, np.float32),
        text=text,
        finish_reason=finish_reason,
        usage=usage,
    )


def _api_key(variable: str | None) -> str:
    key = os.environ.get(variable or DEFAULT_API_KEY_ENV)
    if not key and variable is not None:
        raise ConfigurationError(
            f"The environment variable {variable} is not set; it is to hold the server's API key."
        )
    return key or _NO_KEY


def _reason(error: Any) -> str:
    """Return what the server said about a request that it refused."""
    body = error.body if isinstance(error.body, dict) else {"message": error.body}
    code, text = body.get("code"), body.get("message") or error.message
    return f"{text} ({code})"[:_MAX_REASON_CHARS] if code else str(text)[:_MAX_REASON_CHARS]
