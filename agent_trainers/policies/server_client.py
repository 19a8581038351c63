"""A server with OpenAI's API, as the policies on served models ask it.

Retries with back-off, time limits and connections are the ``openai`` library's; here is what it
leaves open: where the key comes from, how many requests are under way, one kind of error.
"""

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from agent_envs.core.lookup import require_extra
from agent_envs.errors import ConfigurationError, ServerError

MAX_REASON_CHARS: Final = 500
DEFAULT_API_KEY_ENV: Final = "OPENAI_API_KEY"
_NO_KEY: Final = "none"
"""Sent where there is no key; servers of one's own want none, and the library wants some."""
_TOO_LONG: Final = re.compile(
    r"context[ _](length|size|window)|max_model_len|too many (input )?tokens"
    r"|(prompt|input) is too long",
    re.IGNORECASE,
)
Item = TypeVar("Item")
Result = TypeVar("Result")


class PromptTooLongError(ServerError):
    """A state does not fit the served model."""


class ServerClient:
    """The connection to a server; may be used from many threads at once."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        max_concurrency: int,
        timeout_seconds: float = 300.0,
        max_retries: int = 6,
    ) -> None:
        """Prepare to ask the server; nothing is sent yet.

        Args:
            base_url: Where the API begins, such as ``http://localhost:8000/v1``.
            model: The model that is asked, for messages.
            api_key_env: Environment variable that holds the key; ``OPENAI_API_KEY`` if None, and no
                key if that one is not set.
            max_concurrency: Requests under way at once, at most.
            timeout_seconds: How long one request may take.
            max_retries: How often a request is sent again after a fault of the server or the
                network: no connection, no answer in time, status 408, 409, 429, 500 and above.

        Raises:
            MissingExtraError: If the library ``openai`` is not installed.
            ConfigurationError: If the variable is not set, or no request may be under way.
        """
        require_extra("openai", "A served model", "openai")
        import openai

        if max_concurrency < 1:
            raise ConfigurationError(f"max_concurrency ({max_concurrency}) must be at least 1.")
        self._key = os.environ.get(api_key_env or DEFAULT_API_KEY_ENV) or _NO_KEY
        if self._key == _NO_KEY and api_key_env is not None:
            raise ConfigurationError(
                f"The environment variable {api_key_env} is not set; it is to hold the server's "
                "API key."
            )
        self.api = openai.OpenAI(
            base_url=base_url, api_key=self._key, timeout=timeout_seconds, max_retries=max_retries
        )
        self._where = base_url if model is None else f"{base_url}, model {model!r}"
        self._timeout = timeout_seconds
        self._max_concurrency = max_concurrency
        self._slots = threading.BoundedSemaphore(max_concurrency)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Call `function` for each of `items`, side by side; return the results in order."""
        if len(items) <= 1:
            return [function(item) for item in items]
        workers = min(len(items), self._max_concurrency)
        with ThreadPoolExecutor(workers, thread_name_prefix="server-client") as pool:
            return list(pool.map(function, items))

    def call(self, create: Callable[..., Result], **body: Any) -> Result:
        """Send a request: call `create`, a method of `api`, with `body`.

        Raises:
            PromptTooLongError: If the server finds the prompt too long.
            ServerError: If the server fails after all retries, or refuses the request.
        """
        import openai

        try:
            with self._slots:
                if self.api.is_closed():
                    raise self.error("the connection was closed")
                return create(**body)
        except openai.APIStatusError as error:
            reason = _reason(error)
            is_too_long = error.status_code in (400, 413, 422) and _TOO_LONG.search(reason)
            kind = PromptTooLongError if is_too_long else ServerError
            raise self.error(f"status {error.status_code}: {reason}", kind) from None
        except openai.APITimeoutError:
            raise self.error(f"no answer within {self._timeout:g} seconds") from None
        except openai.APIConnectionError as error:
            raise self.error(
                f"cannot be reached ({error.__cause__ or error}). Is the server up, and is the "
                "address right?"
            ) from None
        except (openai.APIError, ValueError) as error:
            raise self.error(f"{type(error).__name__}: {error}") from None

    def error(self, what: str, kind: type[ServerError] = ServerError) -> ServerError:
        """Return an error that names the server, and does not hold its key."""
        if self._key != _NO_KEY:
            what = what.replace(self._key, "…")  # some servers quote the key that they refuse
        return kind(f"{self._where}: {what}")

    def close(self) -> None:
        """Close the connections; no further request gets through."""
        self.api.close()


def _reason(error: Any) -> str:
    """Return what the server said about a request that it refused."""
    body = error.body if isinstance(error.body, dict) else {"message": error.body}
    code, text = body.get("code"), body.get("message") or error.message
    return f"{text} ({code})"[:MAX_REASON_CHARS] if code else str(text)[:MAX_REASON_CHARS]
