"""What has been said in an episode, and which part of it is the state."""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_envs.core.contexts import (
    ContextPolicy,
    History,
    TokenCounter,
    View,
    full,
    make_view,
)
from agent_envs.core.messages import Message, StateMessages


@dataclass(frozen=True, slots=True)
class NewConversation:
    """What `ToolEnv.on_answer` returns to ask on without what has been said before."""

    question: str
    """The first message of the user."""


class Conversation:
    """The messages of an episode, turn by turn; what has been added is never changed."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._initial: tuple[Message, ...] = ()
        self._turns: list[tuple[Message, ...]] = []
        self._said: list[Message] = []  # the messages of all turns: not joined anew at each step

    def begin(self, system_prompt: str, question: str) -> None:
        """Forget what has been said, and ask; there is no system message without a prompt."""
        system = [Message(role="system", content=system_prompt)] if system_prompt else []
        self._initial = (*system, Message(role="user", content=question))
        self._turns, self._said = [], []

    def add_turn(self, action: str, replies: Sequence[Message]) -> None:
        """Add what the model said, and what the environment replied."""
        turn = (Message(role="assistant", content=action), *replies)
        self._turns.append(turn)
        self._said += turn

    def view(self, policy: ContextPolicy, count_tokens: TokenCounter, pinned: str = "") -> View:
        """Return the state that a context policy makes of it.

        Args:
            policy: Chooses what the model sees.
            count_tokens: Counts the tokens of messages, for policies that ask.
            pinned: What stands below the question, whatever the policy drops.
        """
        first = self._first_messages(pinned)
        if policy is full:
            messages = StateMessages(first)
            messages += self._said  # copied once, which is all that grows with the turns
            return View(messages)
        return make_view(policy, History(first, tuple(self._turns), count_tokens, self._initial))

    def _first_messages(self, pinned: str) -> tuple[Message, ...]:
        if not pinned:
            return self._initial
        *system, question = self._initial
        return (*system, {**question, "content": f"{question['content']}\n\n{pinned}"})
