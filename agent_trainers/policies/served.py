"""A policy on a served model: any server with OpenAI's chat completions."""

from collections.abc import Sequence
from typing import Any

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.formats.chat_messages import (
    action_text,
    native_messages,
    native_tools,
    text_messages,
)
from agent_envs.formats.openai_format import FunctionCall
from agent_envs.formats.tool_formats import TOOL_FORMATS, ToolFormat
from agent_trainers.policies.generation import Generation, GenerationRequest, Usage
from agent_trainers.policies.policy import Policy
from agent_trainers.policies.server_client import (
    MAX_REASON_CHARS,
    PromptTooLongError,
    ServerClient,
)


class OpenAIPolicy(Policy):
    """Asks an OpenAI-compatible server for each turn. For evaluation only.

    A server gives no token ids and no log-probabilities of what it sampled, so generations hold
    none, and nothing can be trained on them: trainers have policies of their own.
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
        parallel_calls: bool = True,
        control_tokens: Sequence[str] = (),
        **connection: Any,
    ) -> None:
        """Ask `model` at `base_url`.

        Args:
            base_url: Where the API begins, such as ``http://localhost:8000/v1``.
            model: The name under which the server knows the model.
            tool_format: The environment's tool format, or its name. With structured calls
                (``openai``) the server is told of the tools and the model calls them natively; with
                every other format calls are text.
            max_new_tokens: Longest turn.
            temperature: 0 takes the most likely token.
            top_p: Nucleus sampling.
            max_concurrency: Requests under way at once, at most.
            parallel_calls: Whether the server may make several structured calls in one turn; as the
                environment's ``parallel_calls``.
            control_tokens: Control tokens of the model's tokenizer, beside those of well-known
                families: in what messages say they are broken up by a blank, since the server would
                take them for the chat template's (see `break_control_strings`).
            connection: ``api_key_env``, ``timeout_seconds``, ``max_retries``: see `ServerClient`.

        Raises:
            MissingExtraError: If the library ``openai`` is not installed.
            UnknownNameError: If there is no such tool format.
            ConfigurationError: If the variable is not set, or a number is out of range.
        """
        if isinstance(tool_format, str):
            tool_format = lookup(TOOL_FORMATS, tool_format, kind="tool format")
        if max_new_tokens < 1:
            raise ConfigurationError(f"max_new_tokens ({max_new_tokens}) must be at least 1.")
        self.max_concurrency = max_concurrency
        self.sampling = {"temperature": temperature, "top_p": top_p}
        self._parallel_calls = parallel_calls
        self._format = tool_format
        self._control_tokens = tuple(control_tokens)
        self._body: dict[str, Any] = {
            "model": model,
            "max_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
        }
        self._client = ServerClient(
            base_url, model=model, max_concurrency=max_concurrency, **connection
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return one generation per request, in order; safe to call from many threads.

        Raises:
            ServerError: If the server fails after all retries, or refuses a request.
        """
        return self._client.map(self._turn, requests)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _turn(self, request: GenerationRequest) -> Generation:
        body = {"seed": int(request.rng.integers(2**31)), **self._body}
        try:
            reply = self._client.call(
                self._client.api.chat.completions.create, **body, **self._conversation(request)
            )
        except PromptTooLongError:
            return Generation(text="", finish_reason="overflow", usage=Usage())
        return self._read(reply)

    def _conversation(self, request: GenerationRequest) -> dict[str, Any]:
        said, tools, hidden = request.messages, request.tools, self._control_tokens
        if not self._format.is_structured:
            return {"messages": text_messages(said, tools, hidden)}
        messages = {"messages": native_messages(said, hidden)}
        if not tools:
            return messages
        parallel_calls = {"parallel_tool_calls": self._parallel_calls}
        return messages | {"tools": native_tools(tools, hidden)} | parallel_calls

    def _read(self, reply: Any) -> Generation:
        # The library checks nothing: a proxy's error page comes as a string.
        if not getattr(reply, "choices", None) or reply.choices[0].message is None:
            said = str(reply)[:MAX_REASON_CHARS]
            raise self._client.error(f"the reply is no chat completion: {said}")
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
