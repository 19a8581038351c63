"""Mathematical problems: calculate, then give the final answer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.lookup import lookup, require_extra
from agent_envs.core.rewards import Progress, correct_term, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolResult
from agent_envs.data.dataset_env import DatasetEnv
from agent_envs.data.sources import DatasetSpec, Hub, Source, text_field
from agent_envs.errors import DataError
from agent_envs.formats.tool_formats import ParsedAction
from agent_envs.scoring.math_answers import gsm8k_match, last_boxed, math_equal
from agent_envs.tools.calculator import make_calculator_tool
from agent_envs.tools.code import PythonSession, SandboxChoice, shared_sandbox

_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STEP: Final = re.compile(r"<<([^=<>]*)=([^<>]*)>>")
_LEVEL: Final = re.compile(r"(?:Level )?([1-5])")
MAX_NUMBERS: Final = 20
"""Numbers that tools show beyond so many different ones in an episode are ignored."""


class MathEnv(DatasetEnv):
    """Problems with one final answer, judged by math-verify.

    Tool: ``calculator(expression)``; with ``tools=["python"]`` also ``python(code)``, whose
    variables are kept until the episode ends. Reward terms: ``correct`` at the end (outcome);
    ``intermediate_value`` (share of the reference solution's values that a tool has newly found; a
    right answer earns the rest), ``used_result`` (a later step uses a number that a tool found,
    each once) and ``format`` on the way (process). A number is found if neither the question nor
    the call contains it, and if it is among the first 20 of an episode. ``used_result`` pays for
    needless calls, so it is off by default.
    """

    reward_functions = {
        "correct": correct_term,
        **noted_terms("used_result", "intermediate_value"),
        "format": format_term,
    }
    default_rewards = {"correct": 1.0, "format": 0.02}
    outcome_terms = frozenset({"correct"})
    wants_number = False
    """Whether an answer that is still to be calculated, such as ``17 + 1``, is wrong."""
    tool_signatures = ("calculator(expression)",)
    optional_tool_names = ("python",)
    metric_names = ("success", "num_used_results", *DatasetEnv.metric_names)
    default_system_prompt = (
        "Solve the problem. Calculate with the tool, one step after the other; then give the final "
        "answer alone."
    )

    def __init__(self, *, sandbox: SandboxChoice = "strong", **shared: Any) -> None:
        """Load the problems.

        Args:
            sandbox: Isolation of the tool ``python``; a level, ``"container:IMAGE"``, a `Sandbox`
                or the import path of one; see `agent_envs.sandbox.open_sandbox`.
            shared: Arguments of every environment over a data set; see `DatasetEnv`.
        """
        require_extra("math", type(self).__name__, "math_verify")
        self._python = PythonSession(sandbox)
        optional = {"python": [Tool(self._python.python, timeout=None)]}
        super().__init__(default_tools=[make_calculator_tool()], optional_tools=optional, **shared)
        if "python" in self.tools:
            shared_sandbox(sandbox)  # fails now, not in the middle of an episode

    def begin_episode(self) -> None:
        self._python.close()
        self._asked = _numbers(self.task.question)
        # Expression and value of each step that the reference solution marks.
        self._steps: Sequence[tuple[str, str]] = self.task.data.get("steps", ())
        self._values = _numbers(" ".join(value for _, value in self._steps)) - self._asked
        self._found: set[float] = set()
        self._progress = Progress()
        self._unused: set[float] = set()
        self._seen: set[float] = set()
        self.num_used_results = 0
        self.is_correct = False

    def close(self) -> None:
        self._python.close()
        super().close()

    def on_answer(self, answer: str) -> None:
        self._note_use(answer)
        self.is_correct = math_equal(
            answer, self.task.answers[0], question=self.task.question,
            wants_number=self.wants_number,
        )  # fmt: skip
        if self.is_correct:
            self.noted["intermediate_value"] += self._progress.advance(1.0)

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        said = " ".join(str(value) for value in (action.arguments or {}).values())
        self._note_use(said)
        if result.error is not None:
            return
        new = _numbers(result.content) - _numbers(said) - self._asked - self._seen
        self._seen |= new
        self._unused |= new
        if len(self._seen) <= MAX_NUMBERS and new & self._values:
            self._found |= new & self._values
            found = len(self._found) / len(self._values)
            self.noted["intermediate_value"] += self._progress.advance(found)

    def metrics(self) -> dict[str, float]:
        return {
            "success": float(self.is_correct),
            "num_used_results": float(self.num_used_results),
            **super().metrics(),
        }

    def reference_actions(self) -> list[str]:
        """Calculate the steps of the reference solution, as far as turns allow, then answer."""
        calls = [self.write_call("calculator", expression=e) for e, _ in self._steps]
        limit = len(calls) if self.max_turns is None else max(0, self.max_turns - 1)
        return [*calls[:limit], self.write_answer(self.task.answers[0])]

    def _note_use(self, text: str) -> None:
        used = self._unused & _numbers(text)
        self._unused -= used
        self.noted["used_result"] = float(bool(used))
        self.num_used_results += len(used)


def _read_gsm8k(row: Mapping[str, Any], index: int) -> Task:
    question, solution = text_field(row, "question"), text_field(row, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise DataError("field 'answer' must end with '#### ' and the final answer.")
    return Task(
        id=str(row.get("id") or f"row-{index}"),
        question=question,
        answers=(answer.strip().replace(",", ""),),
        data={"steps": tuple(_STEP.findall(solution))},
    )


class GSM8KEnv(MathEnv):
    """GSM8K (Cobbe et al., 2021, arXiv 2110.14168) as an environment.

    Task: a word problem of grade school; the answer is a number. Tools and rewards: see `MathEnv`;
    the values of ``intermediate_value`` are those that the solution marks ``<<a=b>>``. Metric
    ``official_match``: GSM8K's own rule. The episode ends with an answer.

    Version history: v0, first version.
    """

    dataset = DatasetSpec(
        hub=Hub(name="GSM8K", path="openai/gsm8k", configuration="main", licence="MIT"),
        read=_read_gsm8k,
        form="A GSM8K row needs 'question', and 'answer': a solution that ends with '#### 42'.",
    )
    wants_number = True
    metric_names = (*MathEnv.metric_names, "official_match", "intermediate_value_recall")
    default_rewards = {**MathEnv.default_rewards, "intermediate_value": 0.1}

    def metrics(self) -> dict[str, float]:
        official = gsm8k_match(self.answer, self.task.answers[0]) if self.answer else 0.0
        recall = len(self._found) / len(self._values) if self._values else 1.0
        return super().metrics() | {"official_match": official, "intermediate_value_recall": recall}


def _read_math(row: Mapping[str, Any], index: int) -> Task:
    answer = row.get("answer") or last_boxed(text_field(row, "solution"))
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(
            "there is no answer: neither a field 'answer' nor a \\boxed{} in the field 'solution'."
        )
    found = _LEVEL.fullmatch(str(row.get("level", "")))
    level, subject = int(found.group(1)) if found else None, row.get("subject") or row.get("type")
    return Task(
        id=str(row.get("unique_id") or f"row-{index}"),
        question=text_field(row, "problem"),
        answers=(answer.strip(),),
        data={"level": level, "subject": subject},
    )


class MATHEnv(MathEnv):
    """MATH (Hendrycks et al., 2021, arXiv 2103.03874) as an environment.

    Task: a competition problem; the answer is in LaTeX. Tools and rewards: see `MathEnv`; reference
    solutions mark no intermediate values. The episode ends with an answer. Files of the full test
    set are read too.

    Version history: v0, first version.
    """

    dataset = DatasetSpec(
        hub=Hub(name="MATH", path="HuggingFaceH4/MATH-500", licence="MIT"),
        read=_read_math,
        form="A MATH row needs 'problem', and 'answer' or a 'solution' with \\boxed{}; 'level' and "
        "'subject' (or 'type') are read too.",
    )

    def __init__(
        self,
        *,
        levels: Sequence[int] | None = None,
        subjects: Sequence[str] | None = None,
        **shared: Any,
    ) -> None:
        """Load the problems.

        Args:
            levels: Only these levels, 1 to 5.
            subjects: Only these subjects, such as ``"Algebra"``.
            shared: See `MathEnv`.
        """
        self._wanted = {"level": levels, "subject": subjects}
        super().__init__(**shared)

    def load_tasks(self, source: Source) -> Sequence[Task]:
        tasks = super().load_tasks(source)
        for name, wanted in self._wanted.items():
            if wanted:
                known = {str(task.data[name]): task.data[name] for task in tasks}
                chosen = [lookup(known, str(value), kind=name) for value in wanted]
                tasks = [task for task in tasks if task.data[name] in chosen]
        return tasks


def _numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in _NUMBER.findall(text)}
