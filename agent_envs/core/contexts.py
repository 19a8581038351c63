"""Context policies: which part of the history is the state that the model sees.

Appending everything is only one choice. A policy is any callable from a `History` to messages; the
ones here return a `View`, which also says what was left out and so why the prefix of the state
broke.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.lookup import lookup
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError

SHORTENED_TEXT: Final = "[an earlier result, left out to save space]"
CHARS_PER_TOKEN: Final = 4.0

TokenCounter = Callable[[Sequence[Message]], int]


@dataclass(frozen=True, slots=True)
class History:
    """Everything said in an episode so far."""

    initial: tuple[Message, ...]
    """The messages of the task: system prompt and question."""
    turns: tuple[tuple[Message, ...], ...]
    """For each step the model's message and what the environment replied."""
    count_tokens: TokenCounter
    """Counts the tokens of a state; an estimate unless a policy's tokenizer was put in."""

    @property
    def messages(self) -> list[Message]:
        """The whole history as one list."""
        return self.with_turns(self.turns)

    def with_turns(self, turns: Iterable[Iterable[Message]]) -> list[Message]:
        """Return the messages of the task, and those of `turns`, as one list."""
        return [*self.initial, *(message for turn in turns for message in turn)]


@dataclass(frozen=True, slots=True)
class View:
    """The state, and what it leaves out of the history."""

    messages: list[Message]
    """The state: what the model sees."""
    num_dropped: int = 0
    """Messages of the history that are not in the state."""
    num_shortened: int = 0
    """Messages whose content was replaced by a stub."""
    reason: str | None = None
    """Why, in a few words; None where nothing was left out."""


ContextPolicy = Callable[[History], View | Sequence[Message]]


def full(history: History) -> View:
    """Show everything."""
    return View(history.messages)


@dataclass(frozen=True, slots=True)
class Window:
    """Show the task and the last `turns` turns."""

    turns: int = 3
    """At least 1."""

    def __post_init__(self) -> None:
        """Check the argument."""
        _check_positive("window", "turns", self.turns)

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        messages = history.with_turns(history.turns[-self.turns :])
        num_dropped = len(history.messages) - len(messages)
        reason = f"window: the last {self.turns} turns" if num_dropped else None
        return View(messages, num_dropped, reason=reason)


@dataclass(frozen=True, slots=True)
class Budget:
    """Show everything that fits into `tokens`.

    Shortens the oldest results of tools to a stub first, then drops the oldest turns, and shortens
    the last result only if nothing else helps. The task itself is never touched: a task that is
    longer than the budget stays longer.
    """

    tokens: int = 3_000
    """How many tokens the state may have, at least 1."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check_positive("budget", "tokens", self.tokens)

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        turns = [list(turn) for turn in history.turns]
        num_shortened = num_dropped = 0

        def view() -> View:
            reason = f"budget: {self.tokens} tokens" if num_shortened + num_dropped else None
            return View(history.with_turns(turns), num_dropped, num_shortened, reason)

        def is_too_long() -> bool:
            return history.count_tokens(view().messages) > self.tokens

        for turn in turns[:-1]:
            if not is_too_long():
                return view()
            num_shortened += _shorten(turn)
        while len(turns) > 1 and is_too_long():
            num_dropped += len(turns.pop(0))
        if turns and is_too_long():
            num_shortened += _shorten(turns[-1])
        return view()


CONTEXTS: Final[Mapping[str, Callable[..., ContextPolicy]]] = {
    "full": lambda: full,
    "window": Window,
    "budget": Budget,
}


def make_context(context: str | Mapping[str, Any] | ContextPolicy) -> ContextPolicy:
    """Return the policy that an environment's ``context=`` argument asks for.

    Args:
        context: A name (``"window"``), a name with options (``{"name": "window", "turns": 2}``,
            which JSON can hold), or a policy of your own.

    Raises:
        UnknownNameError: If no policy has that name.
        ConfigurationError: If the options do not fit the policy.
    """
    if callable(context):
        return context
    if not isinstance(context, str | Mapping):
        raise ConfigurationError(
            f"context= takes a name, a name with options, or a callable, not {context!r}."
        )
    options = {"name": context} if isinstance(context, str) else dict(context)
    if not (name := options.pop("name", None)):
        raise ConfigurationError(f'context={options} has no "name"; known: {", ".join(CONTEXTS)}.')
    try:
        return lookup(CONTEXTS, name, kind="context")(**options)
    except TypeError as error:
        raise ConfigurationError(f"context={name!r} does not take {options}: {error}") from None


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of `messages` without a tokenizer: four bytes a token, four more each."""
    num_bytes = sum(len(m["content"].encode("utf-8", "replace")) for m in messages)
    return int(num_bytes / CHARS_PER_TOKEN) + 4 * len(messages)


def _shorten(turn: list[Message]) -> int:
    """Replace what the environment said in `turn`; return how many messages that changed."""
    num_shortened = 0
    for i, message in enumerate(turn):
        if message["role"] != "assistant" and len(message["content"]) > len(SHORTENED_TEXT):
            turn[i] = {**message, "content": SHORTENED_TEXT}
            num_shortened += 1
    return num_shortened


def _check_positive(name: str, option: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"context {name!r}: {option} must be at least 1, not {value!r}.")
