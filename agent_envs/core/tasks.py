"""Tasks, and `TaskFamily`: the methods and declarations that a subclass of `ToolEnv` provides."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from agent_envs.core.contexts import NewConversation
from agent_envs.core.rewards import COST, OUTCOME, PROGRESS, Earnings, RewardFunction, format_term
from agent_envs.core.snapshots import RestorableEnv
from agent_envs.core.tool import ToolResult
from agent_envs.errors import ConfigurationError
from agent_envs.formats.actions import ParsedAction

ENDLESS: Final = 2**31
"""Tasks are drawn from this many where a family has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question to answer, or one goal to reach."""

    id: str
    """Stable over runs, machines and versions of the package."""
    question: str
    """The first message of the user."""
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    data: dict[str, Any] = field(default_factory=dict)
    """Further data for the environment; never shown to the model."""


def choose_task(options: Mapping[str, Any], env: Any) -> int:
    """Return the index of the next task: ``options["task"]`` of `reset`, or a drawn one."""
    if unknown := sorted(set(options) - {"task"}):
        raise ConfigurationError(f"reset(): unknown options {unknown}; the only option is 'task'.")
    limit = ENDLESS if env.num_tasks is None else env.num_tasks
    if (number := options.get("task")) is None:
        return int(env.np_random.integers(limit))
    is_number = hasattr(number, "__index__") and not isinstance(number, bool)
    if not is_number or not 0 <= number < limit:
        raise ConfigurationError(f"There is no task {number!r}: tasks are 0 to {limit - 1}.")
    return int(number)


class TaskFamily(RestorableEnv):
    """Tasks of an environment, and how their actions are judged; only `get_task` has no default."""

    reward_functions: ClassVar[Mapping[str, RewardFunction]] = {"format": format_term}
    default_rewards: ClassVar[Mapping[str, float]] = {}
    outcome_terms: ClassVar[frozenset[str]] = frozenset()
    term_earnings: ClassVar[Mapping[str, Earnings]] = {}
    """Range of terms summed over an episode, for the list of environments, unless it is the usual
    one: `OUTCOME` of outcome terms, `COST` of ``format``, and `PROGRESS` of all others."""
    default_system_prompt: ClassVar[str] = ""
    tool_signatures: ClassVar[tuple[str, ...]] = ()
    """The default tools, for the list of environments."""
    optional_tool_names: ClassVar[tuple[str, ...]] = ()
    """Names that ``tools=`` takes, for the same list."""
    metric_names: ClassVar[tuple[str, ...]] = ("num_turns", "num_tool_calls", "num_invalid_actions")
    """Names of `metrics`, for the same list."""
    data_source: ClassVar[str] = "generated, endless"
    """Source of the tasks, for the same list."""
    computes_only: ClassVar[bool] = False
    """Whether a step of the family never waits for other processes; not inherited by classes
    outside this package."""
    only_appends: ClassVar[bool] = True
    """Whether an episode is one conversation, or one per question, that only grows."""
    num_turns: int
    """Turns of this episode."""
    num_tool_calls: int
    """Tool calls of this episode."""
    num_invalid_actions: int
    """Mistakes of this episode."""

    @classmethod
    def earnings(cls, **arguments: Any) -> Mapping[str, Earnings]:
        """Return the range of each term for these constructor arguments; see `term_earnings`."""
        usual = {
            name: OUTCOME if name in cls.outcome_terms else PROGRESS
            for name in cls.reward_functions
        }
        return {**usual, "format": COST, **cls.term_earnings}

    @property
    def num_tasks(self) -> int | None:
        """The number of tasks, at least 1; None, the default, if they are endless."""
        return None

    @property
    def num_free_calls(self) -> int:
        """Number of calls of the current task that `extra_call_term` does not charge."""
        return 0

    def get_task(self, index: int) -> Task:
        """Return task `index`, from 0; `index` is valid."""
        raise NotImplementedError(f"{type(self).__name__} must define get_task(self, index).")

    def reference_actions(self) -> list[str]:
        """Return actions that solve the current task, if the data allow it."""
        raise NotImplementedError(f"{type(self).__name__} does not define reference_actions().")

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        """Update the episode after each call of a turn; what they add to `noted` is summed."""

    def on_answer(self, answer: str) -> str | NewConversation | None:
        """Judge an answer; the step is rewarded afterwards.

        Returns None, the default, to end the episode; a text, the user's reply, to continue the
        conversation; or a `NewConversation` to continue with a new question in an empty one.
        """
        return None

    def on_message(self, message: str) -> str | NewConversation | None:
        """Reply, as `on_answer`, to a text without a call or an answer: the words of a user.

        An environment that defines this method is a dialogue; in any other such text is a mistake.
        """
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether a tool has ended the task, as in a game that is won."""
        return False

    def pinned_text(self) -> str:
        """Return a text that every state shows below the question; no context policy drops it."""
        return ""

    def begin_episode(self) -> None:
        """Clear the last episode; `task` is already the new one."""

    def begin_step(self) -> None:
        """Clear the last step; called at reset and before each action."""

    def on_restore(self) -> None:
        """Set the attributes of this `task` that `not_in_snapshots` leaves out, after a restore."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episode so far."""
        return {
            "num_turns": float(self.num_turns),
            "num_tool_calls": float(self.num_tool_calls),
            "num_invalid_actions": float(self.num_invalid_actions),
        }
