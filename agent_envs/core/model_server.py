"""Connections to served models: any server with OpenAI's API.

Retries with back-off, timeouts and connections are those of the ``openai`` library.
"""

import os
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.errors import ConfigurationError, ServerError

MAX_REASON_CHARS: Final = 500
DEFAULT_API_KEY_ENV: Final = "OPENAI_API_KEY"
_NO_KEY: Final = "none"
"""Sent without a key, since the library requires one."""
Result = TypeVar("Result")
_URL: Final = re.compile(
    r"https?://(?:[^\s/@]*@)?(?:\[[\w:.]+\]|[^\s/?#:@\[\]]+)(?::\d{1,5})?(?:[/?#]\S*)?"
)


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

        check_url("base_url", base_url)

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

    def chat(self, **body: Any) -> Any:
        """Request a chat completion; a ServerError if the reply is none."""
        reply: Any = self.call(self.api.chat.completions.create, **body)
        try:  # the library does not validate replies: a proxy's error page is a string
            is_valid = isinstance(reply.choices[0].message.content, str | None)
        except (AttributeError, LookupError, TypeError):
            is_valid = False
        if not is_valid:
            text = str(reply)[:MAX_REASON_CHARS]
            raise self.error(f"the reply is not a chat completion: {text}")
        return reply

    def error(self, reason: str) -> ServerError:
        """Return an error that names the server, without its key."""
        if self._key != _NO_KEY:
            reason = reason.replace(self._key, "…")  # some servers quote a rejected key
        return ServerError(f"{self._where}: {reason}")


def check_url(name: str, url: str) -> None:
    """Check that the argument `name` is the address of a server."""
    if not _URL.fullmatch(url):
        raise ConfigurationError(
            f"{name} must begin with http:// or https:// and the name of a host, not {url!r}."
        )
