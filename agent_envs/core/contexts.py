"""Context policies: which part of the history is the state that the model sees.

Appending everything is only one choice. A policy is any callable from a `History` to messages; the
ones here return a `View`, which also says what was left out and so why the prefix of the state
broke.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import lookup, lookup_or_import
from agent_envs.core.messages import Message
from agent_envs.core.model_summary import ModelSummary
from agent_envs.errors import ConfigurationError

SHORTENED_TEXT: Final = "[an earlier result, left out to save space]"
SUMMARY_TEXT: Final = "What has happened so far, in short:\n{summary}"
CHARS_PER_TOKEN: Final = 4.0
_MAX_KEPT_SUMMARIES: Final = 256

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
    task: tuple[Message, ...] = ()
    """`initial` without what the environment pins to it and may change; empty where it is equal."""

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


Summarise = Callable[[Sequence[Message]], str]
"""Takes the task, with the summary so far, and what happened next; returns a text for all of it."""


@dataclass(frozen=True)
class Summary:
    """Show the task, a summary of what is past, and the latest turns.

    Each `turns` turns go into the summary once another follows them, so that the state is extended
    in between, and the summariser is asked once for each of them. The summary stands below the
    question.
    """

    summarise: Summarise
    """Writes the summary; a function may be ``async``."""
    turns: int = 4
    """At least 1."""
    not_in_snapshots: ClassVar[frozenset[str]] = frozenset({"summarise", "turns"})
    _kept: dict[tuple[str, ...], str] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Summaries by what they are of: a state is made at every step, a summary once."""

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check_positive("summary", "turns", self.turns)
        if not callable(self.summarise):
            raise ConfigurationError(
                "context 'summary': summarise= takes a function from messages to a text, its "
                "import path 'module:function', or {'base_url': ..., 'model': ...} for a model "
                f"behind an endpoint, not {self.summarise!r}."
            )

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        num_past = (len(history.turns) - 1) // self.turns * self.turns
        if num_past <= 0:
            return View(history.messages)
        summary = ""
        for start in range(0, num_past, self.turns):
            past = history.turns[start : start + self.turns]
            summary = self._extended(history.task or history.initial, summary, past)
        shown = _with_summary(history.initial, summary)
        latest = [message for turn in history.turns[num_past:] for message in turn]
        num_dropped = sum(map(len, history.turns[:num_past]))
        return View(
            [*shown, *latest], num_dropped, reason=f"summary: of the first {num_past} turns"
        )

    def _extended(
        self, task: Sequence[Message], summary: str, past: Iterable[Iterable[Message]]
    ) -> str:
        messages = [*_with_summary(task, summary), *(m for turn in past for m in turn)]
        key = tuple(text for message in messages for text in (message["role"], message["content"]))
        if key not in self._kept:
            written = resolve(self.summarise([message.copy() for message in messages]))
            if not isinstance(written, str):
                raise TypeError(
                    f"summarise of the context 'summary' returned {reprlib.repr(written)}; it must "
                    "return a text."
                )
            while len(self._kept) >= _MAX_KEPT_SUMMARIES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = written.strip()
        return self._kept[key]


@dataclass(frozen=True, slots=True)
class Chain:
    """Apply several policies, each to what the one before it shows."""

    policies: tuple[ContextPolicy, ...]

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        view = View(history.messages)
        for policy in self.policies:
            new = make_view(policy, history)
            reasons = [reason for reason in (view.reason, new.reason) if reason is not None]
            view = View(
                new.messages,
                view.num_dropped + new.num_dropped,
                view.num_shortened + new.num_shortened,
                "; ".join(reasons) or None,
            )
            history = _as_history(view.messages, history)
        return view


def _make_summary(
    summarise: Summarise | str | Mapping[str, Any] | None = None, **options: Any
) -> Summary:
    if isinstance(summarise, Mapping):
        summarise = ModelSummary(**summarise)
    elif isinstance(summarise, str):
        summarise = lookup_or_import({}, summarise, kind="summariser")
    return Summary(summarise, **options)  # type: ignore[arg-type]  # checked there


CONTEXTS: Final[Mapping[str, Callable[..., ContextPolicy]]] = {
    "full": lambda: full,
    "window": Window,
    "budget": Budget,
    "summary": _make_summary,
}
ContextChoice = str | Mapping[str, Any] | ContextPolicy | Sequence[Any]
"""What ``context=`` takes; see `make_context`."""


def make_context(context: ContextChoice) -> ContextPolicy:
    """Return the policy that an environment's ``context=`` argument asks for.

    Args:
        context: A name (``"window"``), a name with options (``{"name": "window", "turns": 2}``,
            which JSON can hold), a policy of your own, or a list of these: each is applied to what
            the one before it shows.

    Raises:
        UnknownNameError: If no policy has that name.
        ConfigurationError: If the options do not fit the policy.
        MissingExtraError: If a model is to summarise, and the library ``openai`` is missing.
    """
    if callable(context):
        return context
    if isinstance(context, list | tuple) and context:
        return Chain(tuple(map(make_context, context)))
    if not isinstance(context, str | Mapping):
        raise ConfigurationError(
            "context= takes a name, a name with options, or a callable, or a list of these, not "
            f"{context!r}."
        )
    options = {"name": context} if isinstance(context, str) else dict(context)
    if not (name := options.pop("name", None)):
        raise ConfigurationError(f'context={options} has no "name"; known: {", ".join(CONTEXTS)}.')
    try:
        return lookup(CONTEXTS, name, kind="context")(**options)
    except TypeError as error:
        raise ConfigurationError(f"context={name!r} does not take {options}: {error}") from None


def make_view(policy: ContextPolicy, history: History) -> View:
    """Apply a policy; where it returns mere messages, count what they leave out.

    Raises:
        TypeError: If it returns neither messages nor a `View`.
    """
    shown = policy(history)
    if isinstance(shown, View):
        return shown
    if not isinstance(shown, list | tuple) or not shown or not all(map(is_message, shown)):
        raise TypeError(
            f"The context policy {policy!r} returned {reprlib.repr(shown)}; it must return a View, "
            'or a list, not empty, of messages {"role": ..., "content": ...} with texts.'
        )
    num_dropped = max(0, len(history.messages) - len(shown))
    is_same = list(shown) == history.messages
    return View(list(shown), num_dropped, reason=None if is_same else "custom context")


def is_message(message: Any) -> bool:
    """Return whether something is a chat message."""
    return isinstance(message, Mapping) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def only_computes(policy: ContextPolicy) -> bool:
    """Return whether a policy is known to wait for nothing outside of the process."""
    if isinstance(policy, Chain):
        return all(map(only_computes, policy.policies))
    return policy is full or isinstance(policy, Window | Budget)


def stateful_policies(policy: ContextPolicy, place: str = "the context") -> dict[str, Any]:
    """Return, by name, the policies whose class says by ``not_in_snapshots`` that it has a state.

    Any other is taken for a function of the history.
    """
    if isinstance(policy, Chain):
        found: dict[str, Any] = {}
        for number, part in enumerate(policy.policies):
            found |= stateful_policies(part, f"{place}[{number}]")
        return found
    return {place: policy} if hasattr(type(policy), "not_in_snapshots") else {}


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of `messages` without a tokenizer: four bytes a token, four more each."""
    num_bytes = sum(len(m["content"].encode("utf-8", "replace")) for m in messages)
    return int(num_bytes / CHARS_PER_TOKEN) + 4 * len(messages)


def _with_summary(initial: Sequence[Message], summary: str) -> list[Message]:
    """Put a summary below the question: templates want users and models to take turns."""
    if not summary:
        return list(initial)
    *first, question = initial
    text = SUMMARY_TEXT.format(summary=summary)
    return [*first, {**question, "content": f"{question['content']}\n\n{text}"}]


def _as_history(messages: Sequence[Message], history: History) -> History:
    """Return messages as a history: turns begin with what the model said."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*starts[1:], len(messages)]
    turns = tuple(tuple(messages[i:j]) for i, j in zip(starts, ends, strict=False))
    initial = tuple(messages[: starts[0]] if starts else messages)
    return History(initial, turns, history.count_tokens)


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
