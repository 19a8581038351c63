"""Policies on served models: any server with OpenAI's chat completions.

Retries with back-off, timeouts and connections are those of the ``openai`` library.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.errors import ConfigurationError, ServerError
from agent_envs.formats.openai_format import (
    FunctionCall,
    action_text,
    native_messages,
    native_tools,
    text_messages,
)
from agent_envs.formats.tool_formats import TOOL_FORMATS, ToolFormat
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage

MAX_REASON_CHARS: Final = 500
DEFAULT_API_KEY_ENV: Final = "OPENAI_API_KEY"
_NO_KEY: Final = "none"
"""Sent without a key, since the library requires one."""
_TOO_LONG: Final = re.compile(
    r"status (400|413|422): .*(context[ _](length|size|window)|max_model_len"
    r"|too many (input )?tokens|(prompt|input) is too long)",
    re.IGNORECASE | re.DOTALL,
)
Result = TypeVar("Result")


class ServerClient:
    """A connection to a server; thread-safe."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        timeout_seconds: float = 300.0,
        max_retries: int = 6,
    ) -> None:
        """Prepare the connection without sending anything.

        `base_url` is such as ``http://localhost:8000/v1``; `model` is for messages. The key is in
        the environment variable `api_key_env`, by default ``OPENAI_API_KEY`` if that is set.
        """
        require_extra("openai", "A served model", "openai")
        import openai

        self._key = os.environ.get(api_key_env or DEFAULT_API_KEY_ENV) or _NO_KEY
        if self._key == _NO_KEY and api_key_env is not None:
            raise ConfigurationError(
                f"The environment variable {api_key_env} is not set. Set it to the server's API "
                "key."
            )
        self.api = openai.OpenAI(
            base_url=base_url, api_key=self._key, timeout=timeout_seconds, max_retries=max_retries
        )
        self._where = base_url if model is None else f"{base_url}, model {model!r}"

    def call(self, create: Callable[..., Result], **body: Any) -> Result:
        """Send a request by `create`, a method of `api`."""
        import openai

        try:
            return create(**body)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {"message": error.body}
            code, text = body.get("code"), body.get("message") or error.message
            reason = f"{text} ({code})" if code else str(text)
            reason = reason[:MAX_REASON_CHARS]
            raise self.error(f"status {error.status_code}: {reason}") from None
        except (openai.APIError, ValueError) as error:
            reason = f"{type(error).__name__}: {error} ({error.__cause__})"
            raise self.error(reason) from None

    def error(self, reason: str) -> ServerError:
        """Return an error that names the server, without its key."""
        if self._key != _NO_KEY:
            reason = reason.replace(self._key, "…")  # some servers quote a rejected key
        return ServerError(f"{self._where}: {reason}")


class OpenAIPolicy(Policy):
    """A policy on an OpenAI-compatible server, for evaluation only.

    A server returns neither token ids nor log-probabilities of the sampled tokens, so its
    generations cannot be trained on.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        tool_format: str | ToolFormat = "hermes",
        max_new_tokens: int = 512,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_concurrency: int = 16,
        control_tokens: Sequence[str] = (),
        **connection: Any,
    ) -> None:
        """Connect to `model` at `base_url`.

        Args:
            base_url: Base of the API, such as ``http://localhost:8000/v1``.
            model: Name of the model on the server.
            tool_format: The environment's tool format, or its name. With ``openai`` the server gets
                the tools and the model makes structured calls; in other formats calls are text.
            max_new_tokens: Longest turn.
            temperature: 0 for greedy decoding.
            top_p: Nucleus sampling.
            max_concurrency: Concurrent requests at most.
            control_tokens: Further control tokens of the model, which are broken up in messages
                (see `break_control_strings`).
            connection: ``api_key_env``, ``timeout_seconds``, ``max_retries``: see `ServerClient`.
        """
        if isinstance(tool_format, str):
            tool_format = lookup(TOOL_FORMATS, tool_format, kind="tool format")
        self.max_concurrency = max_concurrency
        self.sampling = {"temperature": temperature, "top_p": top_p}
        self._format = tool_format
        self._control_tokens = tuple(control_tokens)
        self._body = {"model": model, "max_tokens": max_new_tokens, **self.sampling}
        self._client = ServerClient(base_url, model=model, **connection)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return [self._turn(request) for request in requests]

    def close(self) -> None:
        self._client.api.close()

    def _turn(self, request: GenerationRequest) -> Generation:
        messages, tools, hidden = request.messages, request.tools, self._control_tokens
        body: dict[str, Any] = {"seed": int(request.rng.integers(2**31)), **self._body}
        if self._format.is_structured:
            body["messages"] = native_messages(messages, hidden)
            if tools:
                body["tools"] = native_tools(tools, hidden)
        else:
            body["messages"] = text_messages(messages, tools, hidden)
        try:
            reply: Any = self._client.call(self._client.api.chat.completions.create, **body)
        except ServerError as error:
            if _TOO_LONG.search(str(error)) is None:
                raise
            return Generation(text="", finish_reason="overflow", usage=Usage())
        # The library does not validate replies: a proxy's error page is a string.
        if not getattr(reply, "choices", None) or reply.choices[0].message is None:
            text = str(reply)[:MAX_REASON_CHARS]
            raise self._client.error(f"the reply is not a chat completion: {text}")
        choice = reply.choices[0]
        calls = [
            FunctionCall(name=call.function.name or "", arguments=call.function.arguments or "")
            for call in choice.message.tool_calls or ()
            if getattr(call, "function", None) is not None
        ]
        counted = reply.usage
        return Generation(
            text=action_text(choice.message.content or "", calls, self._format),
            finish_reason="length" if choice.finish_reason == "length" else "stop",
            usage=Usage(
                calls=1,
                prompt_tokens=counted.prompt_tokens if counted else 0,
                completion_tokens=counted.completion_tokens if counted else 0,
            ),
        )
