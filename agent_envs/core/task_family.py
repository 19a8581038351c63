"""`TaskFamily`: what a subclass of `ToolEnv` provides.

Tasks, what a call and an answer mean for them, and what is measured; and what it declares.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from agent_envs.core.conversation import NewConversation
from agent_envs.core.rewards import COST, Earnings, RewardFunction, format_term
from agent_envs.core.snapshots import RestorableEnv
from agent_envs.core.tasks import Task
from agent_envs.core.tool import ToolResult
from agent_envs.formats.tool_formats import ParsedAction


class TaskFamily(RestorableEnv):
    """The part of an environment that knows its tasks; only `get_task` has no default."""

    reward_functions: ClassVar[Mapping[str, RewardFunction]] = {"format": format_term}
    default_rewards: ClassVar[Mapping[str, float]] = {}
    outcome_terms: ClassVar[frozenset[str]] = frozenset()
    term_earnings: ClassVar[Mapping[str, Earnings]] = {"format": COST}
    """What the terms that are on by default can sum to, for the list of environments."""
    default_system_prompt: ClassVar[str] = ""
    tool_signatures: ClassVar[tuple[str, ...]] = ()
    """The tools it has without further arguments, for the list of environments."""
    optional_tool_names: ClassVar[tuple[str, ...]] = ()
    """What ``tools=`` takes by name, for the same list."""
    metric_names: ClassVar[tuple[str, ...]] = ("num_turns", "num_tool_calls", "num_invalid_actions")
    """What `metrics` measures, for the same list."""
    data_source: ClassVar[str] = "generated, endless"
    """Where its tasks come from, for the same list."""
    computes_only: ClassVar[bool] = False
    """Whether what the family itself does in a step waits for nothing outside of the process; a
    subclass outside of this package says so for itself."""
    num_turns: int
    """How many turns this episode has had."""
    num_tool_calls: int
    """How many of them called a tool."""
    num_invalid_actions: int
    """How many of them were mistakes."""

    @classmethod
    def earnings(cls, **arguments: Any) -> Mapping[str, Earnings]:
        """Return `term_earnings`, as they are with these arguments of the environment."""
        return cls.term_earnings

    @property
    def num_tasks(self) -> int | None:
        """How many tasks there are, at least 1; None, as here, where they are endless."""
        return None

    def get_task(self, index: int) -> Task:
        """Return task `index`, from 0; `index` is valid."""
        raise NotImplementedError(
            f"{type(self).__name__} must define get_task(self, index) and return a Task: an id, "
            "the question that the model is asked, and the right answers."
        )

    def reference_actions(self) -> list[str]:
        """Return actions that solve the current task, where the data allow it."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define reference_actions(self): actions that solve "
            "the current task, written with write_call and write_answer."
        )

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        """Note what a tool call brought about; the step is rewarded afterwards.

        Called for each call of a turn, in order. What several put into `noted` is added up.
        """

    def on_answer(self, answer: str) -> str | NewConversation | None:
        """Judge an answer, and say whether the episode goes on; the step is rewarded afterwards.

        Returns:
            None, as here, to end the episode. A text to go on: the user's reply, in the same
            conversation. A `NewConversation` to go on with a question of its own, where what was
            said before is not part of the state.
        """
        return None

    def on_message(self, message: str) -> str | NewConversation | None:
        """Reply to what the model says without a call or an answer, as a user would.

        An environment that has this method is a dialogue: plain text is said to the user. In any
        other, it is a mistake.

        Returns:
            As `on_answer`: a text is the user's reply, None ends the episode.
        """
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether what a tool did has ended the task, as in a game that is won."""
        return False

    def pinned_text(self) -> str:
        """Return what every state shows below the question; empty, as here, for nothing.

        Whatever a context policy drops, this stays. When it changes, states no longer extend each
        other.
        """
        return ""

    def begin_episode(self) -> None:
        """Forget the last episode; `task` is already the new one."""

    def begin_step(self) -> None:
        """Forget what the last step earned; called at reset and before each action."""

    def on_restore(self) -> None:
        """Bring back what `not_in_snapshots` leaves out and each episode makes anew.

        Called after a snapshot of an episode was restored; `task` and `task_index` are its own.
        """

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now."""
        return {
            "num_turns": float(self.num_turns),
            "num_tool_calls": float(self.num_tool_calls),
            "num_invalid_actions": float(self.num_invalid_actions),
        }
