"""A summariser: a model behind an OpenAI-compatible endpoint."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_envs.core.extras import require_extra
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError, ServerError

PROMPT: Final = (
    "Below is what an assistant was asked, and what it has done so far. Write a summary from which "
    "it can go on: what is known, from where, what was tried without success, and what is left to "
    "do. Write nothing else."
)
_MAX_REASON_CHARS: Final = 500
_NO_KEY: Final = "none"
"""Sent where there is no key; the library wants some."""


@dataclass(kw_only=True)
class ModelSummary:
    """Asks a model for a summary, at temperature 0; may be used from many threads."""

    base_url: str
    """Where the API begins, such as ``http://localhost:8000/v1``."""
    model: str
    """The name under which the server knows the model."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; servers of one's own need none."""
    max_tokens: int = 400
    """Longest summary."""
    timeout_seconds: float = 60.0
    """How long one request may take."""
    max_retries: int = 3
    """How often a request is sent again after a fault of the server or the network."""
    prompt: str = PROMPT
    """What the model is told to do."""
    _client: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            MissingExtraError: If the library ``openai`` is not installed.
        """
        require_extra("openai", "A model that summarises", "openai")
        if self.max_tokens < 1 or self.timeout_seconds <= 0 or self.max_retries < 0:
            raise ConfigurationError(
                f"A model that summarises: max_tokens ({self.max_tokens}) and timeout_seconds "
                f"({self.timeout_seconds}) must be positive, max_retries ({self.max_retries}) 0 or "
                "more."
            )

    def __call__(self, messages: Sequence[Message]) -> str:
        """Return a summary of `messages`.

        Raises:
            ServerError: If the server fails after all retries, or refuses the request.
        """
        import openai

        try:
            reply = self._api().chat.completions.create(
                model=self.model,
                max_tokens=self.max_tokens,
                temperature=0.0,
                messages=[
                    {"role": "system", "content": self.prompt},
                    {"role": "user", "content": _as_text(messages)},
                ],
            )
            content = reply.choices[0].message.content or ""
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            # some servers quote the key that they refuse
            said = str(error).replace(self._key, "…") if self._key != _NO_KEY else str(error)
            reason = f"{type(error).__name__}: {said}"[:_MAX_REASON_CHARS]
            raise ServerError(f"{self.base_url}, model {self.model!r}: {reason}") from None
        return str(content).rpartition("</think>")[2].strip()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the connection out; it is opened anew."""
        return self.__dict__ | {"_client": None}

    @property
    def _key(self) -> str:
        return os.environ.get(self.api_key_env) or _NO_KEY

    def _api(self) -> Any:
        if self._client is None:
            import openai

            self._client = openai.OpenAI(
                base_url=self.base_url,
                api_key=self._key,
                timeout=self.timeout_seconds,
                max_retries=self.max_retries,
            )
        return self._client


def _as_text(messages: Sequence[Message]) -> str:
    text = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be sent
