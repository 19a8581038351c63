"""Context policies: the part of the history that is the state, which the model sees.

A policy is any callable from a `History` to messages; those here return a `View`, which also counts
what is left out and gives the reason.
"""

import bisect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import lookup_or_import
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError

SHORTENED_TEXT: Final = "[an earlier result, left out to save space]"
SUMMARY_TEXT: Final = "What has happened so far, in short:\n{summary}"
SUMMARY_REQUEST_TEXT: Final = (
    "The messages since the task will now be removed. Write a summary of them: everything that you "
    "still need. It replaces them and any earlier summary."
)
EMPTY_SUMMARY_TEXT: Final = "The summary is empty."
TokenCounter = Callable[[Sequence[Message]], int]


@dataclass(frozen=True, slots=True)
class History:
    """All messages of an episode so far."""

    initial: tuple[Message, ...]
    """The messages of the task: system prompt and question."""
    turns: tuple[tuple[Message, ...], ...]
    """For each step the model's message and the replies of the environment."""
    count_tokens: TokenCounter
    """Counts the tokens of a state; an estimate unless a policy's tokenizer is set."""
    task: tuple[Message, ...] = ()
    """`initial` without the text that the environment pins to it; empty if there is none."""
    summaries: dict[tuple[str, ...], str] = field(default_factory=dict, repr=False, compare=False)
    """The summaries written in this episode, by the texts that they summarise."""
    summary_turns: tuple[int, ...] = ()
    """The indices of the `turns` in which the model wrote a requested summary."""
    seed: int = 0
    """Seed of a policy's own draws, a function of that of the episode."""

    @property
    def messages(self) -> list[Message]:
        """The whole history as one list."""
        return self.with_turns(self.turns)

    def with_turns(self, turns: Iterable[Iterable[Message]]) -> list[Message]:
        """Return the messages of the task and those of `turns` as one list."""
        return [*self.initial, *(message for turn in turns for message in turn)]


@dataclass(frozen=True, slots=True)
class View:
    """The state, and how it differs from the history."""

    messages: list[Message]
    """The state: what the model sees."""
    num_dropped: int = 0
    """Messages of the history that are not in the state."""
    num_shortened: int = 0
    """Messages whose content was replaced by a stub."""
    reason: str | None = None
    """Why messages were dropped or shortened; None if none were."""
    is_summary_requested: bool = False
    """Whether the state asks for a summary, which the model's next turn then is."""


ContextPolicy = Callable[[History], View | Sequence[Message]]


def full(history: History) -> View:
    """Show everything."""
    return View(history.messages)


@dataclass(frozen=True, slots=True)
class Window:
    """Show the task and the last `turns` turns."""

    turns: int = 3
    """At least 1."""

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        messages = history.with_turns(history.turns[-self.turns :])
        return _view(history, messages, f"window: the last {self.turns} turns")


@dataclass(frozen=True, slots=True)
class Budget:
    """Show everything that fits into `tokens`.

    The oldest tool results are shortened to a stub first, then the oldest turns are dropped, and
    the last result is shortened only if nothing else helps. The task is never changed: a task that
    is longer than the budget stays longer.
    """

    tokens: int = 3_000
    """Maximum number of tokens of the state, at least 1."""

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        turns, num_shortened = [list(turn) for turn in history.turns], 0

        def fits(num_dropped: int = 0) -> bool:
            messages = history.with_turns(turns[num_dropped:])
            return history.count_tokens(messages) <= self.tokens

        is_short = fits()  # counting is slow: a trainer renders and tokenises the state
        for turn in turns[:-1]:
            if is_short:
                break
            if shortened := _shorten(turn):
                num_shortened, is_short = num_shortened + shortened, fits()
        if turns and not is_short:
            del turns[: bisect.bisect_left(range(len(turns) - 1), True, key=fits)]
            if len(turns) == 1 and not fits():
                num_shortened += _shorten(turns[-1])
        messages = history.with_turns(turns)
        return _view(history, messages, f"budget: {self.tokens} tokens", num_shortened)


Summarise = Callable[[Sequence[Message]], str]
"""Takes the task with the summary so far, and the messages since then; returns a new summary."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Show the task, a summary of the past below the question, and the latest turns.

    Each block of `turns` turns enters the summary once another turn follows it, so the state is
    extended in between, and the summariser is called once per block.
    """

    summarise: Summarise
    """Writes the summary; sync or async."""
    turns: int = 4
    """At least 1."""

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        num_past = (len(history.turns) - 1) // self.turns * self.turns
        summary = ""
        for start in range(0, num_past, self.turns):
            past = history.turns[start : start + self.turns]
            summary = self._extended(history, summary, past)
        latest = [message for turn in history.turns[max(0, num_past) :] for message in turn]
        messages = [*_with_summary(history.initial, summary), *latest]
        return _view(history, messages, f"summary: of the first {num_past} turns")

    def _extended(self, history: History, summary: str, past: Iterable[Iterable[Message]]) -> str:
        task = history.task or history.initial
        messages = [*_with_summary(task, summary), *(m for turn in past for m in turn)]
        key = tuple(text for message in messages for text in (message["role"], message["content"]))
        if key not in history.summaries:
            written: str = resolve(self.summarise([message.copy() for message in messages]))
            history.summaries[key] = written.strip()
        return history.summaries[key]


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """Show the task, the model's latest summary, and the turns since.

    If that exceeds the budget, the state requests a summary, and the next turn of the model is it.
    Tokens are always estimated, never counted by a tokenizer: the recorded actions of an episode
    replay without its model.
    """

    budget_tokens: int = 3_000
    """Estimated tokens of the state beyond which it requests a summary, at least 1."""
    min_tokens: int | None = None
    """If set, the threshold before each summary is drawn from `min_tokens` to `budget_tokens`."""
    request: str = SUMMARY_REQUEST_TEXT
    """Text of the request."""

    def __post_init__(self) -> None:
        """Check the range of the thresholds."""
        if self.min_tokens is not None and self.min_tokens > self.budget_tokens:
            raise ConfigurationError(
                f"context 'policy': min_tokens ({self.min_tokens}) must not exceed budget_tokens "
                f"({self.budget_tokens})."
            )

    def __call__(self, history: History) -> View:
        """Return the state for `history`."""
        num_past, summary = 0, ""
        if written := history.summary_turns:
            num_past, summary = written[-1] + 1, history.turns[written[-1]][0]["content"]
        latest = [message for turn in history.turns[num_past:] for message in turn]
        messages = [*_with_summary(history.initial, summary), *latest]
        is_requested = bool(latest) and estimate_tokens(messages) > self._threshold(history)
        if is_requested:
            messages = _with_request(messages, self.request)
        past = [turn for i, turn in enumerate(history.turns[:num_past]) if i not in written]
        return View(
            messages,
            num_dropped=sum(map(len, past)),
            reason=f"policy: the model's summary of {len(past)} turns" if written else None,
            is_summary_requested=is_requested,
        )

    def _threshold(self, history: History) -> int:
        if self.min_tokens is None:
            return self.budget_tokens
        rng = np.random.default_rng([history.seed, len(history.summary_turns)])
        return int(rng.integers(self.min_tokens, self.budget_tokens, endpoint=True))


def _make_summary(summarise: Summarise | str, **options: Any) -> Summary:
    function: Any = summarise
    if isinstance(summarise, str):
        function = lookup_or_import({}, summarise, kind="summariser")
    if not callable(function):
        raise TypeError(f"summarise= is a function or its import path, not {summarise!r}")
    return Summary(function, **options)


CONTEXTS: Final[Mapping[str, Callable[..., ContextPolicy]]] = {
    "full": lambda: full,
    "window": Window,
    "budget": Budget,
    "summary": _make_summary,
    "policy": PolicySummary,
}
ContextChoice = str | Mapping[str, Any] | ContextPolicy
"""Type of ``context=``; see `make_context`."""


def make_context(context: ContextChoice) -> ContextPolicy:
    """Return the policy that an environment's ``context=`` argument describes.

    It is a name (``"window"``), a name with options (``{"name": "window", "turns": 2}``), or a
    custom policy, also as its import path.
    """
    if callable(context):
        return context
    options = dict(context) if isinstance(context, Mapping) else {"name": context}
    if not isinstance(name := options.pop("name", None), str):
        raise ConfigurationError(
            f"context={context!r} has no name. Write it as 'window' or {{'name': 'window', ...}}."
        )
    for option in {"turns", "tokens", "budget_tokens", "min_tokens"} & options.keys():
        if not isinstance(value := options[option], int) or value < 1:
            raise ConfigurationError(f"context {name!r}: {option} must be at least 1, not {value}.")
    try:
        make: Any = lookup_or_import(CONTEXTS, name, kind="context")
        is_policy = ":" in name and not options and not isinstance(make, type)
        policy: ContextPolicy = make if is_policy else make(**options)
        return policy
    except TypeError as error:
        raise ConfigurationError(f"context={name!r} does not take {options}: {error}") from None


def make_view(policy: ContextPolicy, history: History) -> View:
    """Apply a policy; if it returns plain messages, count the dropped ones."""
    shown = policy(history)
    if isinstance(shown, View):
        return shown
    messages = [Message(**m) for m in shown or () if isinstance(m, Mapping) and "role" in m]
    texts = [m.get("content") for m in messages]
    if not texts or len(texts) != len(shown) or not all(isinstance(t, str) for t in texts):
        raise TypeError(
            f"The context policy {policy!r} returned {reprlib.repr(shown)}; it must return a View, "
            'or a list, not empty, of messages {"role": ..., "content": ...} with texts.'
        )
    reason = None if messages == history.messages else "custom context"
    return View(messages, max(0, len(history.messages) - len(messages)), reason=reason)


def _view(history: History, messages: list[Message], reason: str, num_shortened: int = 0) -> View:
    """Return the state with its difference from the history; `reason` explains it, if there is."""
    num_dropped = len(history.messages) - len(messages)
    is_same = num_dropped + num_shortened == 0
    return View(messages, num_dropped, num_shortened, None if is_same else reason)


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of `messages` without a tokenizer: four bytes a token, four more each."""
    num_bytes = sum(len(m["content"].encode("utf-8", "replace")) for m in messages)
    return num_bytes // 4 + 4 * len(messages)


@dataclass(frozen=True, slots=True)
class NewConversation:
    """Return value of `ToolEnv.on_answer`: start a conversation without the messages before."""

    question: str
    """The first message of the user."""


class Conversation:
    """The messages of an episode, turn by turn."""

    seed = 0
    """See `History.seed`."""
    is_summary_requested = False
    """Whether the latest view requested a summary."""

    def begin(self, system_prompt: str, question: str) -> None:
        """Start over with a question; without a prompt there is no system message."""
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self._initial: tuple[Message, ...] = (*system, Message(role="user", content=question))
        self._turns: list[tuple[Message, ...]] = []
        self._summaries: dict[tuple[str, ...], str] = {}
        self._summary_turns: tuple[int, ...] = ()

    def add_summary(self, summary: str) -> None:
        """Add the requested summary."""
        self._summary_turns = (*self._summary_turns, len(self._turns))
        self.add_turn(summary, ())

    def add_turn(self, action: str, replies: Sequence[Message]) -> None:
        """Add the model's text, and the replies of the environment."""
        self._turns.append((Message(role="assistant", content=action), *replies))

    def view(self, policy: ContextPolicy, count_tokens: TokenCounter, pinned: str = "") -> View:
        """Return the state that a policy selects; none drops `pinned`, below the question."""
        initial, turns = _below_question(self._initial, pinned), tuple(self._turns)
        history = History(
            initial, turns, count_tokens, self._initial, self._summaries, self._summary_turns,
            self.seed,
        )  # fmt: skip
        view = make_view(policy, history)
        self.is_summary_requested = view.is_summary_requested
        return view


def _with_summary(initial: tuple[Message, ...], summary: str) -> tuple[Message, ...]:
    return _below_question(initial, summary and SUMMARY_TEXT.format(summary=summary))


def _with_request(messages: list[Message], request: str) -> list[Message]:
    """Add a request of the user; templates require that users and models alternate."""
    if messages[-1]["role"] == "user":
        return [*_below_question(tuple(messages), request)]
    return [*messages, Message(role="user", content=request)]


def _below_question(initial: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Add a text to the question: templates require that users and models alternate."""
    if not text:
        return initial
    *first, question = initial
    return (*first, {**question, "content": f"{question['content']}\n\n{text}"})


def _shorten(turn: list[Message]) -> int:
    """Replace the replies of the environment in `turn`; return how many."""
    num_shortened = 0
    for i, message in enumerate(turn):
        if message["role"] != "assistant" and len(message["content"]) > len(SHORTENED_TEXT):
            turn[i] = {**message, "content": SHORTENED_TEXT}
            num_shortened += 1
    return num_shortened
