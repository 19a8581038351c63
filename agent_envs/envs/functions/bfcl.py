"""BFCL, the Berkeley Function-Calling Leaderboard."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.lookup import require_extra
from agent_envs.core.rewards import final_metric, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_env import ToolEnv
from agent_envs.envs.functions import bfcl_checks, bfcl_rows
from agent_envs.formats.actions import text_argument
from agent_envs.formats.openai_format import FunctionCall, write_message
from agent_envs.formats.tool_formats import ParsedAction

PACKAGE_VERSION: Final = "2026.3.23"
MAX_STEPS_A_TURN: Final = 20
"""The package's limit, after which it ends the episode."""
MAX_CALLS_A_TURN: Final = 200
MORE_FUNCTIONS_TEXT: Final = (
    "I have updated some more functions you can choose from. What about now?"
)
RECORDED_TEXT: Final = "The call is recorded."
TOO_MANY_CALLS_TEXT: Final = f"This is not run: a turn of the user takes {MAX_CALLS_A_TURN} calls."


class BFCLEnv(ToolEnv):
    """BFCL v4 (Patil et al., 2025, ICML; package ``bfcl-eval``) as an environment.

    Task: fulfil requests with functions. Single-turn categories: write the right calls, all in one
    turn, or none if no function fits; the package's AST checker judges them, and the episode ends.
    Multi-turn categories: up to eight requests of one user, fulfilled by calls that change the
    state of simulated back-ends; an answer ends a user turn. After each, state and responses are
    compared with those of the ground truth, as in the package. The episode ends after the last
    request, or after 21 steps in one user turn.

    Tools: the task's own, under the package's names with ``_`` for ``.``. Reward terms:
    ``correct`` at the end (outcome): the package's verdict; ``turns`` (the share of the user turns
    that are passed now, up to the first failure) and ``format`` on the way (process). A malformed
    turn is a mistake and may be repeated; the package's single attempt is ``success`` with
    ``num_invalid_actions`` 0.

    It is a public test set: do not report results of models that were trained on it. The package
    reads the calendar where a traveller's age matters.

    Version history: v0, first version.
    """

    reward_functions = {
        "correct": final_metric("success"),
        **noted_terms("turns"),
        "format": format_term,
    }
    default_rewards = {"correct": 1.0, "turns": 0.2, "format": 0.02}
    computes_only = True
    outcome_terms = frozenset({"correct"})
    tool_signatures = ("the functions of the task",)
    metric_names = ("success", "turns_passed", *ToolEnv.metric_names)
    data_source = "the package `bfcl-eval`; licence: Apache-2.0"
    not_in_snapshots = frozenset({"_categories"})
    default_system_prompt = (
        "You call functions to do what the user asks. If none of the functions can be used, or the "
        "user has not given what they require, say so instead. Go on calling until the request is "
        "fulfilled as well as you can; your answer then ends your turn, and the user may ask on."
    )

    def __init__(self, *, category: str | Sequence[str] = "all", **shared: Any) -> None:
        """Choose the tasks.

        Args:
            category: A category of the package, such as ``"multi_turn_base"``; a group:
                ``"single_turn"``, ``"live"``, ``"non_live"``, ``"multi_turn"``, ``"all"``; or
                several.
            shared: Arguments of `ToolEnv`.
        """
        # bfcl-eval is not part of the extra: its pins conflict with ours
        also = f"; and then: pip install --no-deps bfcl-eval=={PACKAGE_VERSION}"
        require_extra("bfcl", "AgentR1/BFCL-v0", "bfcl_eval", "mpmath", also=also)
        self._categories = bfcl_rows.choose_categories(category)
        super().__init__(**shared)

    @property
    def num_tasks(self) -> int:
        return sum(len(bfcl_rows.read_category(name)) for name in self._categories)

    def get_task(self, index: int) -> Task:
        for name in self._categories:
            rows = bfcl_rows.read_category(name)
            if index < len(rows):
                break
            index -= len(rows)
        return Task(
            id=rows[index].id,
            question=_as_text(rows[index].turns[0]),
            answers=(),
            data={"category": name, "index": index},
        )

    def begin_episode(self) -> None:
        self._back_ends = bfcl_checks.BackEnds(self._row)
        self._turn = self._num_passed = 0
        self._has_failed = self._is_judged = False
        self._responses: Counter[str] = Counter()
        self._begin_turn()
        self._begin_row()

    def on_answer(self, answer: str) -> str | None:
        """Judge the user turn that ends here, and return the next request."""
        self._judge()
        if self._turn == len(self._row.turns):
            return None
        self._begin_turn()
        text = _as_text(self._row.turns[self._turn])
        if not (added := self._row.added.get(self._turn, ())):
            return text
        self._begin_row()
        text = text or MORE_FUNCTIONS_TEXT
        if self.action_format.is_native:
            return text
        tools = bfcl_rows.make_tools(added, self._row, self._call)
        return f"{self.action_format.instructions(tools)}\n{text}"

    def is_finished(self) -> bool:
        """Return whether the only turn has called, or a user turn has too many steps."""
        num_steps = self.num_turns - self._first_step
        return self._is_judged or (self._row.is_multi_turn and num_steps > MAX_STEPS_A_TURN)

    def on_restore(self) -> None:
        self._begin_row()

    def metrics(self) -> dict[str, float]:
        return {
            "success": float(self._is_judged and not self._has_failed),
            "turns_passed": self._num_passed / len(self._row.turns),
            **super().metrics(),
        }

    def reference_actions(self) -> list[str]:
        """Return the ground truth, one call a step in multi-turn categories.

        Raises:
            NotImplementedError: For rows in which the checker refuses the first accepted values.
        """
        if not (turns := bfcl_checks.right_turns(self._row)):
            raise NotImplementedError(f"{self.task.id}: no right call is known for this row.")
        return [action for calls in turns for action in self._write_turn(calls)]

    def write_call(self, name: str, /, **arguments: Any) -> str:
        late = bfcl_rows.make_tools(sum(self._row.added.values(), ()), self._row, self._call)
        tool = {tool.name: tool for tool in [*late, *self.tools.values()]}.get(name)
        # With tags, a single text is written without JSON only if the tool takes nothing else.
        if self.tool_format == "tags" and tool is not None and text_argument(tool) is None:
            written = json.dumps(arguments, ensure_ascii=False)
            return f"<{name}>{written}</{name}>"
        return super().write_call(name, **arguments)

    def _write_turn(self, calls: Sequence[bfcl_checks.Call]) -> list[str]:
        """Write a user turn: one call a step and an answer, or all calls in one step."""
        written = [(bfcl_rows.tool_name(name), arguments) for name, arguments in calls]
        if not calls:
            return [self.write_answer("Done.")]
        if not self._row.is_multi_turn:
            return [self._write_calls(written)]
        # Several calls a step if the user turn would have too many steps.
        size = -(-len(written) // MAX_STEPS_A_TURN)
        steps = [written[start : start + size] for start in range(0, len(written), size)]
        return [*map(self._write_calls, steps), self.write_answer("Done.")]

    def _write_calls(self, calls: Sequence[bfcl_checks.Call]) -> str:
        if not self.action_format.is_structured:
            return "\n".join(self.write_call(name, **arguments) for name, arguments in calls)
        functions = [FunctionCall(name=n, arguments=json.dumps(dict(a))) for n, a in calls]
        return write_message("", functions)

    @property
    def _row(self) -> bfcl_rows.Row:
        data = self.task.data
        rows: tuple[bfcl_rows.Row, ...] = bfcl_rows.read_category(data["category"])
        return rows[int(data["index"])]

    def _begin_row(self) -> None:
        """Offer the functions of this turn."""
        row = self._row
        added = [document for turn in range(self._turn + 1) for document in row.added.get(turn, ())]
        self.offer_tools(bfcl_rows.make_tools((*row.functions, *added), row, self._call))

    def _begin_turn(self) -> None:
        self._calls: list[bfcl_checks.Call] = []
        self._first_step = self.num_turns

    def _carry_out(self, calls: Sequence[ParsedAction]) -> list[Any]:
        done = super()._carry_out(calls)
        if self._calls and not self._row.is_multi_turn:
            # An invalid call is a wrong call.
            self._calls += [("", {}) for call in calls if call.kind == "invalid"]
            self._judge()
        return done

    def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a function of the task, or record the call in single-turn categories."""
        if len(self._calls) >= MAX_CALLS_A_TURN:
            return ToolResult(TOO_MANY_CALLS_TEXT, error="tool_error")
        self._calls.append((name, arguments))
        if not self._row.is_multi_turn:
            return ToolResult(RECORDED_TEXT)
        result = self._back_ends.call(name, arguments)
        self._responses[result.content] += 1
        return result

    def _judge(self) -> None:
        """Judge the current user turn, and count it if all before it were right."""
        row = self._row
        if row.is_multi_turn:
            reference = bfcl_checks.run_ground_truth(row)[self._turn]
            is_right = bfcl_checks.is_right_state(
                self._back_ends.instances, self._responses, len(self._calls), reference
            )
        else:
            is_right = bfcl_checks.is_right_turn(row, self._calls)
        self._turn += 1
        self._is_judged = self._turn == len(row.turns)
        self._has_failed = self._has_failed or not is_right
        if not self._has_failed:
            self._num_passed += 1
            self.noted["turns"] = 1 / len(row.turns)


def _as_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Join the messages of a turn; several are written as a transcript.

    System messages of a row are part of its question, below the environment's own prompt.
    """
    *before, last = messages or ({"content": ""},)
    system = [message["content"] for message in before if message["role"] == "system"]
    talk = [message for message in before if message["role"] != "system"]
    if talk:
        lines = [f"{message['role'].capitalize()}: {message['content']}" for message in talk]
        return "\n\n".join([*system, *lines, f"User: {last['content']}"])
    return "\n\n".join([*system, last["content"]])
