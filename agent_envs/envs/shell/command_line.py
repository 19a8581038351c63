"""A shell in a scratch folder: find, extract, rename, edit, merge, undo."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import (
    COST,
    OUTCOME,
    PROGRESS,
    Earnings,
    Progress,
    RewardFunction,
    StepEvent,
    format_term,
    noted_terms,
)
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.envs.shell.tasks import KINDS, ShellTask, make_shell_task
from agent_envs.errors import ConfigurationError
from agent_envs.sandbox import Level
from agent_envs.tools.code import LIMITS, describe, shared_sandbox

MAX_DIFFICULTY: Final = 3


def solved_term(env: "CommandLineEnv", event: StepEvent) -> float:
    """Return 1 at the end if the folder is as it must be; outcome."""
    return float(event.is_last and env.share_right == 1.0)


class CommandLineEnv(ToolEnv):
    """Procedural tasks for a shell, judged by the state of the folder in the end.

    Tool: ``shell(command)``; every command begins in the task's folder. To say that it is done, the
    agent answers, with any text. Reward terms: ``solved`` at the end (outcome); ``progress`` (by
    how much the best share of right files so far has grown, as a share of what was wrong at the
    start) and ``format`` on the way (process). New files beside those that are asked for do no
    harm. The
    episode ends with the answer, or at the turn limit (8 turns unless ``max_episode_steps=`` says
    otherwise).

    Version history: v0, first version.
    """

    reward_functions: ClassVar[Mapping[str, RewardFunction]] = {
        "solved": solved_term,
        **noted_terms("progress"),
        "format": format_term,
    }
    default_rewards: ClassVar[Mapping[str, float]] = {
        "solved": 1.0,
        "progress": 0.1,
        "format": 0.02,
    }
    term_earnings: ClassVar[Mapping[str, Earnings]] = {
        "solved": OUTCOME, "progress": PROGRESS, "format": COST
    }  # fmt: skip
    computes_only: ClassVar[bool] = True
    outcome_terms: ClassVar[frozenset[str]] = frozenset({"solved"})
    tool_signatures: ClassVar[tuple[str, ...]] = ("shell(command)",)
    metric_names: ClassVar[tuple[str, ...]] = ("success", "share_right", *ToolEnv.metric_names)
    not_in_snapshots: ClassVar[frozenset[str]] = frozenset({"_sandbox"})
    default_system_prompt: ClassVar[str] = (
        "Do what is asked with shell commands, which run in the folder of the task. When it is "
        "done, answer: done."
    )

    def __init__(
        self,
        *,
        kinds: str | Sequence[str] | None = None,
        difficulty: int = 1,
        split: str = "train",
        sandbox: Level = "strong",
        **shared: Any,
    ) -> None:
        """Choose the family of tasks, and open the sandbox.

        Args:
            kinds: Which kinds of tasks; all if not given.
            difficulty: 1 to 3.
            split: ``"train"`` or ``"test"``; they have no task in common.
            sandbox: How commands are isolated; see `agent_envs.sandbox.open_sandbox`.
            shared: What every tool environment takes; see `ToolEnv`.

        Raises:
            UnknownNameError: If a kind or a split is unknown.
            ConfigurationError: If the difficulty is out of range.
            SandboxUnavailableError: If this machine does not offer the isolation.
        """
        chosen = (kinds,) if isinstance(kinds, str) else tuple(KINDS if kinds is None else kinds)
        for kind in chosen:
            lookup(KINDS, kind, kind="kind of task")
        if not chosen or difficulty not in range(1, MAX_DIFFICULTY + 1):
            raise ConfigurationError(
                f"kinds must not be empty, and difficulty is 1 to {MAX_DIFFICULTY}: {difficulty}."
            )
        self._kinds, self._difficulty, self._split = chosen, difficulty, split
        self._split_seed = lookup({"train": 0, "test": 1}, split, kind="split")
        self._sandbox = shared_sandbox(sandbox)
        super().__init__(default_tools=[Tool(self.shell, timeout=None)], **shared)

    def get_task(self, index: int) -> Task:
        """Make task `index` of the split."""
        rng = np.random.default_rng([self._split_seed, index, self._difficulty])
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        made = make_shell_task(rng, kind, self._difficulty)
        return Task(
            id=f"{kind}-{self._difficulty}-{self._split}-{index}",
            question=made.instruction,
            answers=("done",),
            data={"task": made},
        )

    def begin_episode(self) -> None:
        """Lay the folder out anew."""
        self._made: ShellTask = self.task.data["task"]
        files = self._made.files
        self._files: dict[str, bytes] = {path: files[path].encode() for path in files}
        self._progress = Progress(self.share_right)

    def shell(self, command: str) -> str:
        """Run a command in the folder of the task.

        Args:
            command: What /bin/sh runs.
        """
        result = self._sandbox.run_shell(
            command, files=self._files, limits=LIMITS, collect_files=True
        )
        self._files = dict(result.files)
        gain = self._progress.advance(self.share_right)
        self.noted["progress"] = self.noted.get("progress", 0.0) + gain
        return describe(result)

    @property
    def share_right(self) -> float:
        """The share of files that are as they must be, those that must be gone included."""
        made = self._made
        right = [self._files.get(path) == text.encode() for path, text in made.expected.items()]
        right += [path not in self._files for path in made.absent]
        return sum(right) / len(right)

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now; without an answer it is no success."""
        is_done = self.answer is not None or self.num_turns == self.max_turns
        return {
            "success": float(is_done and self.share_right == 1.0),
            "share_right": self.share_right,
            **super().metrics(),
        }

    def reference_actions(self) -> list[str]:
        """Run the commands that do it, then say so."""
        calls = [self.write_call("shell", command=command) for command in self._made.commands]
        return [*calls, self.write_answer("done")]
