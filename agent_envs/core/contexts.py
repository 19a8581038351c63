"""Context policies: the part of the history that is the state, which the model sees.

A policy is any callable from a `History` to messages; those here return a `View`, which also counts
what is left out and gives the reason.
"""

import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from agent_envs.core.async_bridge import resolve
from agent_envs.core.lookup import lookup, lookup_or_import, require_extra
from agent_envs.core.messages import Message
from agent_envs.errors import ConfigurationError, ServerError

SHORTENED_TEXT: Final = "[an earlier result, left out to save space]"
SUMMARY_TEXT: Final = "What has happened so far, in short:\n{summary}"
SUMMARY_PROMPT: Final = (
    "Below is what an assistant was asked, and what it has done so far. Write a summary from which "
    "it can go on: what is known, from where, what was tried without success, and what is left to "
    "do. Write nothing else."
)
CHARS_PER_TOKEN: Final = 4.0
_MAX_REASON_CHARS: Final = 500
_NO_KEY: Final = "none"

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
        num_dropped = len(history.messages) - len(messages)
        reason = f"window: the last {self.turns} turns" if num_dropped else None
        return View(messages, num_dropped, reason=reason)


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
        if num_past <= 0:
            return View(history.messages)
        summary = ""
        for start in range(0, num_past, self.turns):
            past = history.turns[start : start + self.turns]
            summary = self._extended(history, summary, past)
        shown = _with_summary(history.initial, summary)
        latest = [message for turn in history.turns[num_past:] for message in turn]
        num_dropped = sum(map(len, history.turns[:num_past]))
        return View(
            [*shown, *latest], num_dropped, reason=f"summary: of the first {num_past} turns"
        )

    def _extended(self, history: History, summary: str, past: Iterable[Iterable[Message]]) -> str:
        task = history.task or history.initial
        messages = [*_with_summary(task, summary), *(m for turn in past for m in turn)]
        key = tuple(text for message in messages for text in (message["role"], message["content"]))
        if key not in history.summaries:
            written = resolve(self.summarise([message.copy() for message in messages]))
            if not isinstance(written, str):
                said = f"summarise of the context 'summary' returned {reprlib.repr(written)}"
                raise TypeError(f"{said}; it must return a text.")
            history.summaries[key] = written.strip()
        return history.summaries[key]


@dataclass(kw_only=True)
class ModelSummary:
    """Summariser: a model behind an OpenAI-compatible endpoint, at temperature 0; thread-safe."""

    base_url: str
    """Base URL of the API, such as ``http://localhost:8000/v1``."""
    model: str
    """Name of the model on the server."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; many local servers need none."""
    max_tokens: int = 400
    """Maximum length of a summary."""
    prompt: str = SUMMARY_PROMPT
    """System prompt of the summariser."""

    def __post_init__(self) -> None:
        """Check that the library ``openai`` is installed."""
        require_extra("openai", "A model that summarises", "openai")

    def __call__(self, messages: Sequence[Message]) -> str:
        """Return a summary of `messages`.

        Raises:
            ServerError: If the server fails after all retries, or refuses the request.
        """
        import openai

        text = "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)
        text = text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates cannot be sent
        key = os.environ.get(self.api_key_env) or _NO_KEY
        asked: Any = [
            {"role": "system", "content": self.prompt}, {"role": "user", "content": text}
        ]  # fmt: skip
        try:
            with openai.OpenAI(
                base_url=self.base_url, api_key=key, timeout=60.0, max_retries=3
            ) as client:
                reply = client.chat.completions.create(
                    model=self.model, max_tokens=self.max_tokens, temperature=0.0, messages=asked
                )
            content = reply.choices[0].message.content or ""
        except (openai.OpenAIError, AttributeError, IndexError, TypeError, ValueError) as error:
            # some servers quote the key that they refuse
            said = str(error).replace(key, "…") if key != _NO_KEY else str(error)
            reason = f"{type(error).__name__}: {said}"[:_MAX_REASON_CHARS]
            raise ServerError(f"{self.base_url}, model {self.model!r}: {reason}") from None
        return content.rpartition("</think>")[2].strip()


@dataclass(frozen=True, slots=True)
class Chain:
    """Apply several policies, each to the result of the one before."""

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
    if not callable(summarise):
        raise ConfigurationError(
            "context 'summary': summarise= takes a function from messages to a text, its "
            "import path 'module:function', or {'base_url': ..., 'model': ...} for a model "
            f"behind an endpoint, not {summarise!r}."
        )
    return Summary(summarise, **options)


CONTEXTS: Final[Mapping[str, Callable[..., ContextPolicy]]] = {
    "full": lambda: full,
    "window": Window,
    "budget": Budget,
    "summary": _make_summary,
}
ContextChoice = str | Mapping[str, Any] | ContextPolicy | Sequence[Any]
"""Type of ``context=``; see `make_context`."""


def make_context(context: ContextChoice) -> ContextPolicy:
    """Return the policy that an environment's ``context=`` argument describes.

    Args:
        context: A name (``"window"``), a name with options (``{"name": "window", "turns": 2}``,
            which JSON can hold), a custom policy, or a list of these: each is applied to the result
            of the one before.

    Raises:
        UnknownNameError: If no policy has that name.
        ConfigurationError: If the options do not fit the policy.
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
    name = options.pop("name", "")
    for option in {"turns", "tokens"} & options.keys():
        if not isinstance(value := options[option], int) or value < 1:
            raise ConfigurationError(f"context {name!r}: {option} must be at least 1, not {value}.")
    try:
        return lookup(CONTEXTS, name, kind="context")(**options)
    except TypeError as error:
        raise ConfigurationError(f"context={name!r} does not take {options}: {error}") from None


def make_view(policy: ContextPolicy, history: History) -> View:
    """Apply a policy; if it returns plain messages, count the dropped ones."""
    shown = policy(history)
    if isinstance(shown, View):
        return shown
    is_list = isinstance(shown, list | tuple) and len(shown) > 0
    if not is_list or not all(
        isinstance(message, Mapping)
        and all(isinstance(message.get(name), str) for name in ("role", "content"))
        for message in shown
    ):
        raise TypeError(
            f"The context policy {policy!r} returned {reprlib.repr(shown)}; it must return a View, "
            'or a list, not empty, of messages {"role": ..., "content": ...} with texts.'
        )
    num_dropped = max(0, len(history.messages) - len(shown))
    is_same = list(shown) == history.messages
    return View(list(shown), num_dropped, reason=None if is_same else "custom context")


def only_computes(policy: ContextPolicy) -> bool:
    """Return whether a policy is known not to wait for other processes."""
    if isinstance(policy, Chain):
        return all(map(only_computes, policy.policies))
    return policy is full or isinstance(policy, Window | Budget)


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of `messages` without a tokenizer: four bytes a token, four more each."""
    num_bytes = sum(len(m["content"].encode("utf-8", "replace")) for m in messages)
    return int(num_bytes / CHARS_PER_TOKEN) + 4 * len(messages)


@dataclass(frozen=True, slots=True)
class NewConversation:
    """Return value of `ToolEnv.on_answer`: start a conversation without the messages before."""

    question: str
    """The first message of the user."""


class Conversation:
    """The messages of an episode, turn by turn."""

    def begin(self, system_prompt: str, question: str) -> None:
        """Start over with a question; without a prompt there is no system message."""
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self._initial: tuple[Message, ...] = (*system, Message(role="user", content=question))
        self._turns: list[tuple[Message, ...]] = []
        self._summaries: dict[tuple[str, ...], str] = {}

    def add_turn(self, action: str, replies: Sequence[Message]) -> None:
        """Add the model's text, and the replies of the environment."""
        self._turns.append((Message(role="assistant", content=action), *replies))

    def view(self, policy: ContextPolicy, count_tokens: TokenCounter, pinned: str = "") -> View:
        """Return the state that a policy selects; none drops `pinned`, below the question."""
        initial = self._initial
        if pinned:
            *system, question = initial
            initial = (*system, {**question, "content": f"{question['content']}\n\n{pinned}"})
        turns = tuple(self._turns)
        history = History(initial, turns, count_tokens, self._initial, self._summaries)
        return make_view(policy, history)


def _with_summary(initial: Sequence[Message], summary: str) -> list[Message]:
    """Put a summary below the question: templates require that users and models alternate."""
    if not summary:
        return list(initial)
    *first, question = initial
    text = SUMMARY_TEXT.format(summary=summary)
    return [*first, {**question, "content": f"{question['content']}\n\n{text}"}]


def _as_history(messages: Sequence[Message], history: History) -> History:
    """Return messages as a history: a turn starts with the model's message."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*starts[1:], len(messages)]
    turns = tuple(tuple(messages[i:j]) for i, j in zip(starts, ends, strict=False))
    initial = tuple(messages[: starts[0]] if starts else messages)
    return History(initial, turns, history.count_tokens, summaries=history.summaries)


def _shorten(turn: list[Message]) -> int:
    """Replace the replies of the environment in `turn`; return how many messages changed."""
    num_shortened = 0
    for i, message in enumerate(turn):
        if message["role"] != "assistant" and len(message["content"]) > len(SHORTENED_TEXT):
            turn[i] = {**message, "content": SHORTENED_TEXT}
            num_shortened += 1
    return num_shortened
