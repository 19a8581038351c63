"""A shell in a scratch folder: find, extract, rename, edit, merge, undo."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Progress, final_metric, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool
from agent_envs.core.tool_env import ToolEnv
from agent_envs.envs.shell.conflicts import CONFLICT_KINDS
from agent_envs.envs.shell.tasks import KINDS, ShellTask
from agent_envs.errors import ConfigurationError
from agent_envs.sandbox import Folder
from agent_envs.tools.code import SandboxChoice, describe, run_shell, shared_sandbox

ALL_KINDS: Final = {**KINDS, **CONFLICT_KINDS}
MAX_DIFFICULTY: Final = 3
MAX_JUDGED_BYTES: Final = 1 << 16


class CommandLineEnv(ToolEnv):
    """Procedural tasks for a shell, judged by the final state of the folder.

    Kinds: ``find``, ``extract``, ``rename``, ``edit``, ``merge`` and ``undo``, mixed unless
    ``kinds=`` says otherwise. Four more with conflicting state, in which the obvious command does
    harm, only if ``kinds=`` names them: ``stale_state`` (files are out of date), ``half_done`` (a
    job was interrupted), ``name_collision`` (names are taken) and ``contradictory_sources`` (files
    disagree, and a policy decides).

    Tool: ``shell(command)``; every command starts in the task's folder, in the state after the last
    one: files, folders, rights and links. The agent answers, with any text, when it is done. Reward
    terms: ``solved`` at the end (outcome); ``progress`` (growth of the best share of right files so
    far, relative to what was wrong at the start) and ``format`` on the way (process). ``success``
    is strict; ``share_right`` is the share of right files; tasks with conflicting state also have a
    ``partial_score``, the share of checks that hold, down to single lines, with one check for all
    that must not change. Additional files do no harm. The episode ends with the answer, or at the
    turn limit.

    Version history: v0, first version.
    """

    reward_functions = {
        "solved": final_metric("success"),
        **noted_terms("progress"),
        "format": format_term,
    }
    default_rewards = {"solved": 1.0, "progress": 0.1, "format": 0.02}
    computes_only = True
    outcome_terms = frozenset({"solved"})
    not_in_snapshots = frozenset({"_sandbox"})
    tool_signatures = ("shell(command)",)
    metric_names = ("success", "share_right", "num_denied_calls", *ToolEnv.metric_names)
    default_system_prompt = (
        "Do what is asked with shell commands, which run in the folder of the task. When it is "
        "done, answer: done."
    )

    def __init__(
        self,
        *,
        kinds: str | Sequence[str] | None = None,
        difficulty: int = 1,
        split: str = "train",
        sandbox: SandboxChoice = "strong",
        **shared: Any,
    ) -> None:
        """Choose the family of tasks, and open the sandbox.

        Args:
            kinds: Kinds of tasks; the first six above if not given.
            difficulty: 1 to 3: more files, deeper folders, more to do.
            split: ``"train"`` or ``"test"``; they have no task in common.
            sandbox: Isolation of commands; a level, ``"container:IMAGE"``, a `Sandbox`
                or the import path of one; see `agent_envs.sandbox.open_sandbox`.
            shared: Arguments of `ToolEnv`.
        """
        self._kinds = (kinds,) if isinstance(kinds, str) else tuple(kinds or KINDS)
        for kind in self._kinds:
            lookup(ALL_KINDS, kind, kind="kind of task")
        if difficulty not in range(1, MAX_DIFFICULTY + 1):
            raise ConfigurationError(f"difficulty must be 1 to {MAX_DIFFICULTY}, not {difficulty}.")
        self._difficulty, self._split = difficulty, split
        self._split_seed = lookup({"train": 0, "test": 1}, split, kind="split")
        shared_sandbox(sandbox)  # fails now, not in the middle of an episode
        self._sandbox = sandbox
        super().__init__(default_tools=[Tool(self.shell, timeout=None)], **shared)

    def get_task(self, index: int) -> Task:
        rng = np.random.default_rng([self._split_seed, index, self._difficulty])
        kind = self._kinds[int(rng.integers(len(self._kinds)))]
        made = ALL_KINDS[kind](rng, self._difficulty)
        return Task(
            id=f"{kind}-{self._difficulty}-{self._split}-{index}",
            question=made.instruction,
            answers=("done",),
            data={"task": made},
        )

    def begin_episode(self) -> None:
        self._made: ShellTask = self.task.data["task"]
        self._set_folder(Folder.of(self._made.files))
        self.num_denied_calls = 0
        self._progress = Progress(self.share_right)  # right at first earns nothing

    def shell(self, command: str) -> str:
        """Run a command in the folder of the task.

        Args:
            command: What /bin/sh runs.
        """
        result = run_shell(self._sandbox, command, self._folder)
        self.num_denied_calls += result.denied_calls or 0
        if result.folder is not None:  # else it was lost, and the previous one stays
            self._set_folder(result.folder)
        self.noted["progress"] += self._progress.advance(self.share_right)
        return "\n".join([describe(result), *(f"[not kept: {line}]" for line in result.left_out)])

    def _set_folder(self, folder: Folder) -> None:
        self._folder = folder
        judged = {*self._made.expected, *self._made.absent}
        contents = folder.contents().items()
        self._contents = {path: _text(content) for path, content in contents if path in judged}

    @property
    def share_right(self) -> float:
        """Share of files that are as required, including those that must be gone."""
        made, contents = self._made, self._contents
        right = [contents.get(path) == text for path, text in made.expected.items()]
        right += [path not in contents for path in made.absent]
        return sum(right) / len(right)

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now; without an answer it is no success."""
        is_done = self.answer is not None or self.num_turns == self.max_turns
        metrics = {
            "success": float(is_done and self.share_right == 1.0),
            "share_right": self.share_right,
            "num_denied_calls": float(self.num_denied_calls),
        }
        if self._made.kind in CONFLICT_KINDS:
            checks = self._made.checks(self._contents)
            metrics["partial_score"] = sum(checks) / len(checks)
        return {**metrics, **super().metrics()}

    def reference_actions(self) -> list[str]:
        calls = [self.write_call("shell", command=command) for command in self._made.commands]
        return [*calls, self.write_answer("done")]


def _text(content: bytes | None) -> str | None:
    """Return a file's text; None if it is no plain text file, or longer than any right one."""
    try:
        is_long = content is not None and len(content) > MAX_JUDGED_BYTES
        return None if content is None or is_long else content.decode()
    except UnicodeDecodeError:
        return None
