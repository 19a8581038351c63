"""Endpoints of judges: requests with structured output, within limits, with retries and cost."""

import functools
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from agent_envs.core.contexts import estimate_tokens
from agent_envs.core.messages import Message
from agent_envs.core.model_server import ServerClient
from agent_envs.errors import ServerError

WINDOW_SECONDS: Final = 60.0
PAUSE_SECONDS: Final = 0.5
"""Pause before the second attempt; it doubles with each further one."""
_FINAL: Final = re.compile(r"status (400|401|403|404|413|422):")
"""Refusals that another attempt would not change."""
Value = TypeVar("Value")


class RateLimit:
    """Limits of requests and tokens in any minute, for the threads of one process."""

    clock, sleep = staticmethod(time.monotonic), staticmethod(time.sleep)

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self._requests, self._tokens = requests or math.inf, tokens or math.inf
        self._sent: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def acquire(self, tokens: int) -> None:
        """Wait until a request of `tokens` is allowed; one above the limit is sent alone."""
        with self._lock:  # while one waits, the others would wait, too
            while len(self._sent) >= self._requests or (
                self._sent and sum(size for _, size in self._sent) + tokens > self._tokens
            ):
                self.sleep(max(0.0, self._sent[0][0] + WINDOW_SECONDS - self.clock()))
                self._sent.popleft()
            self._sent.append((self.clock(), tokens))


@dataclass(kw_only=True, eq=False)
class Endpoint:
    """A model behind OpenAI's chat completions; thread-safe. A judge by rules overrides `send`."""

    base_url: str
    model: str
    """Name of the model on the server; part of the key of cached judgements."""
    api_key_env: str | None = None
    """Environment variable of the key; ``OPENAI_API_KEY`` by default."""
    max_tokens: int = 512
    timeout_seconds: float = 60.0
    attempts: int = 5
    """Attempts at a judgement; failed requests and invalid replies count alike."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Limit of prompts, as estimated, with longest replies."""
    price: tuple[float, float] = (0.0, 0.0)
    """Price of a million prompt tokens and of a million completion tokens."""
    usage: Counter[str] = field(default_factory=Counter, init=False)
    """Requests, failures, prompt and completion tokens of this process."""

    def __post_init__(self) -> None:  # noqa: D105
        self._limit = RateLimit(self.requests_per_minute, self.tokens_per_minute)
        self._lock = threading.Lock()

    def cost(self, used: Counter[str]) -> float:
        """Return the price of counted tokens."""
        prompt, completion = self.price
        return (used["prompt_tokens"] * prompt + used["completion_tokens"] * completion) / 1e6

    def ask(
        self, messages: Sequence[Message], schema: dict[str, Any], read: Callable[[str], Value]
    ) -> tuple[Value, Counter[str]]:
        """Return what `read` makes of a reply and what was used; a ServerError if it takes none."""
        used, problem = Counter[str](), ""
        try:
            for attempt in range(self.attempts):
                time.sleep(PAUSE_SECONDS * 2 ** (attempt - 1) if attempt else 0.0)
                self._limit.acquire(estimate_tokens(messages) + self.max_tokens)
                used["requests"] += 1
                try:
                    return read(self.send(messages, schema, used)), used
                except (ServerError, ValueError) as error:
                    problem = str(error)
                used["failures"] += 1
                if _FINAL.search(problem):
                    break
            raise ServerError(
                f"The judge {self.model} at {self.base_url} gave no judgement in "
                f"{used['requests']} attempts, so the episode cannot be scored. {problem}"
            )
        finally:
            with self._lock:
                self.usage.update(used)

    def send(self, messages: Sequence[Message], schema: dict[str, Any], used: Counter[str]) -> str:
        """Return a reply in the form of a JSON schema, and add its tokens to `used`."""
        form = {"name": "judgement", "schema": schema, "strict": True}
        reply = self._client.chat(
            model=self.model, messages=list(messages), temperature=0.0, max_tokens=self.max_tokens,
            response_format={"type": "json_schema", "json_schema": form},
        )  # fmt: skip
        for name in ("prompt_tokens", "completion_tokens"):
            counted = getattr(reply.usage, name, None)
            used[name] += counted if isinstance(counted, int) else 0
        return reply.choices[0].message.content or ""

    @functools.cached_property
    def _client(self) -> ServerClient:
        # no retries of the library: each request counts for the limits
        return ServerClient(
            self.base_url, model=self.model, api_key_env=self.api_key_env,
            timeout_seconds=self.timeout_seconds, max_retries=0,
        )  # fmt: skip
