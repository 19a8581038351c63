"""Policies on served models: any server with OpenAI's chat completions."""

import re
from collections.abc import Sequence
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.core.model_server import ServerClient
from agent_envs.errors import ServerError
from agent_envs.formats.openai_format import (
    FunctionCall,
    action_text,
    native_messages,
    native_tools,
    text_messages,
)
from agent_envs.formats.tool_formats import TOOL_FORMATS, ToolFormat
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage

_TOO_LONG: Final = re.compile(
    r"status (400|413|422): .*(context[ _](length|size|window)|max_model_len"
    r"|too many (input )?tokens|(prompt|input) is too long)",
    re.IGNORECASE | re.DOTALL,
)


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
            reply = self._client.chat(**body)
        except ServerError as error:
            if _TOO_LONG.search(str(error)) is None:
                raise
            return Generation(text="", finish_reason="overflow", usage=Usage())
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
