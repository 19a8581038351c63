"""Programming problems: write, run, test and repair, then give the program."""

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.rewards import Progress, correct_term, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolResult
from agent_envs.data.dataset_env import DatasetEnv
from agent_envs.data.sources import DatasetSpec, Hub, text_field
from agent_envs.errors import DataError
from agent_envs.sandbox import Verdict
from agent_envs.scoring.public_examples import parse_quietly, public_examples
from agent_envs.tools.code import SandboxChoice, describe, judge, run_python, shared_sandbox

_FENCE: Final = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class CodeEnv(DatasetEnv):
    """Write a Python program; hidden tests decide.

    Tools: ``run_code(code)``, and ``run_tests(code)`` for the public tests, both in the sandbox.
    The answer is the whole program. Reward terms: ``passed`` at the end (outcome); ``public_tests``
    (growth of the best share passed so far; a right answer completes it), ``repair`` (1 once: a
    program passes all of them after one that did not) and ``format`` on the way (process).
    ``repair`` pays for failing first, so it is off by default.
    """

    reward_functions = {
        "passed": correct_term,
        **noted_terms("public_tests", "repair"),
        "format": format_term,
    }
    default_rewards = {"passed": 1.0, "public_tests": 0.1, "format": 0.02}
    outcome_terms = frozenset({"passed"})
    not_in_snapshots = frozenset({"_sandbox"})
    tool_signatures = ("run_code(code)", "run_tests(code)")
    metric_names = (
        *("success", "public_test_share", "num_failed_runs", "num_denied_calls"),
        *DatasetEnv.metric_names,
    )  # fmt: skip
    default_system_prompt = (
        "Write the Python program that is asked for. Run it and test it, repair what fails, then "
        "give the whole program as the answer."
    )

    def __init__(self, *, sandbox: SandboxChoice = "strong", **shared: Any) -> None:
        """Load the problems and open the sandbox, which all environments of a process share.

        Args:
            sandbox: Isolation of programs; a level, ``"container:IMAGE"``, a `Sandbox`
                or the import path of one; see `agent_envs.sandbox.open_sandbox`.
            shared: Arguments of every environment over a data set; see `DatasetEnv`.
        """
        shared_sandbox(sandbox)  # fails now, not in the middle of an episode
        self._sandbox = sandbox
        tools = [Tool(self.run_code, timeout=None), Tool(self.run_tests, timeout=None)]
        super().__init__(default_tools=tools, **shared)  # the sandbox keeps the time

    def begin_episode(self) -> None:
        self.best_share = 0.0
        self._progress = Progress()
        self.num_failed_runs = self.num_denied_calls = 0
        self.is_correct = False
        self._has_failed = self._has_passed = False

    def run_code(self, code: str) -> ToolResult:
        """Run a Python program and see what it prints.

        Args:
            code: The whole program.
        """
        result = run_python(self._sandbox, code)
        self.num_failed_runs += result.status != "ok"
        self.num_denied_calls += result.denied_calls or 0
        return ToolResult(describe(result), data={"status": result.status})

    def run_tests(self, code: str) -> ToolResult:
        """Run the public tests against a Python program.

        Args:
            code: The whole program.
        """
        program, tests = self.program(code), self.task.data["public_tests"]
        if not tests:
            return ToolResult("There are no public tests.", data={"passed": 0, "total": 0})
        verdicts = [self._judge(program, test) for test in tests]
        passed, total = sum(verdict.passed for verdict in verdicts), len(tests)
        self.best_share = max(self.best_share, passed / total)
        self.noted["public_tests"] += self._progress.advance(passed / total)
        self.num_failed_runs += passed < total
        if passed == total:
            self.noted["repair"] = float(self._has_failed and not self._has_passed)
        self._has_failed |= passed < total
        self._has_passed |= passed == total
        lines = [
            f"{'passed' if v.passed else f'FAILED ({v.message or v.reason})'}: {test}"
            for test, v in zip(tests, verdicts, strict=True)
        ]
        text = "\n".join([*lines, f"{passed} of {total} passed."])
        return ToolResult(text, data={"passed": passed, "total": total})

    def on_answer(self, answer: str) -> None:
        self.is_correct = self._judge(self.program(answer), self.task.data["tests"]).passed
        if self.is_correct:
            self.noted["public_tests"] = self._progress.advance(1.0)

    def _judge(self, program: str, tests: str) -> Verdict:
        data = self.task.data
        name = data.get("entry_point")
        names = [name] if name else entry_points(data["solution"], data["tests"])
        return judge(self._sandbox, program, tests, names=names, helpers=data["solution"])

    def program(self, answer: str) -> str:
        """Return the program in an answer, without the fence of a code block."""
        blocks = _FENCE.findall(answer)
        return "\n\n".join(blocks) if blocks else answer

    def metrics(self) -> dict[str, float]:
        return {
            "success": float(self.is_correct),
            "public_test_share": self.best_share,
            "num_failed_runs": float(self.num_failed_runs),
            "num_denied_calls": float(self.num_denied_calls),
            **super().metrics(),
        }

    def reference_actions(self) -> list[str]:
        solution = self.task.data["solution"]
        return [self.write_call("run_tests", code=solution), self.write_answer(solution)]


def _read_humaneval(row: Mapping[str, Any], index: int) -> Task:
    prompt, solution, test, entry_point = (
        text_field(row, field) for field in ("prompt", "canonical_solution", "test", "entry_point")
    )
    return Task(
        id=str(row.get("task_id", f"row-{index}")),
        question=prompt,
        answers=(prompt + solution,),
        data={
            "solution": prompt + solution,
            "entry_point": entry_point,
            "public_tests": public_examples(prompt, entry_point),
            "tests": f"{test}\n\ncheck({entry_point})\n",
        },
    )


class HumanEvalEnv(CodeEnv):
    """HumanEval (Chen et al., 2021, arXiv 2107.03374) as an environment.

    Task: complete a function, given its signature and docstring; the public tests are the examples
    in the docstring that are plain Python. Tools and rewards: see `CodeEnv`. The episode ends with
    an answer.

    Version history: v0, first version.
    """

    dataset = DatasetSpec(
        hub=Hub(name="HumanEval", path="openai/openai_humaneval", licence="MIT"),
        read=_read_humaneval,
        form="A HumanEval row needs 'prompt', 'canonical_solution', 'test' and 'entry_point'.",
    )

    def program(self, answer: str) -> str:
        """Return the program; a mere function body is put below the given signature.

        The imports and definitions that precede the function in the prompt are kept in any case.
        """
        prompt, code = self.task.question, super().program(answer)
        if f"def {self.task.data['entry_point']}" in code:
            return f"{prompt}    pass\n\n{code}"
        return prompt + _indented(code)


def _read_mbpp(row: Mapping[str, Any], index: int) -> Task:
    tests, more = row.get("test_list"), row.get("challenge_test_list") or []
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise DataError("field 'test_list' must be a list of assertions.")
    tests = [str(test).strip() for test in tests]
    solution = text_field(row, "code").replace("\r\n", "\n")
    setup = str(row.get("test_setup_code") or "").replace("\r\n", "\n")
    text = text_field(row, "text" if "text" in row else "prompt").strip()
    return Task(
        id=f"mbpp-{row.get('task_id', index)}",
        question=f"{text}\nYour program must pass this test:\n{tests[0]}",
        answers=(solution,),
        data={
            "solution": solution,
            "public_tests": ("\n".join(filter(None, [setup, tests[0]])),),
            "tests": "\n".join([setup, *tests, *map(str, more)]),
        },
    )


class MBPPEnv(CodeEnv):
    """MBPP (Austin et al., 2021, arXiv 2108.07732) as an environment.

    Task: write a function from a sentence. The first test is public, which also shows the
    function's name; all of them, and the challenge tests, are the hidden ones. Tools and rewards:
    see `CodeEnv`. The episode ends with an answer.

    Version history: v0, first version.
    """

    dataset = DatasetSpec(
        hub=Hub(
            name="MBPP", path="google-research-datasets/mbpp", configuration="full",
            licence="CC BY 4.0",
        ),
        read=_read_mbpp,
        form="An MBPP row needs 'text' (or 'prompt'), 'code' and 'test_list'.",
    )  # fmt: skip


def entry_points(solution: str, tests: str) -> list[str]:
    """Return the names that tests take from a program, for data without an entry point.

    Of the names in each assertion, the function that the reference defines last: earlier ones are
    its helpers, which the tests take from the reference. A class only if there is no function.
    """
    try:
        reference, tree = parse_quietly(solution), parse_quietly(tests)
    except (SyntaxError, ValueError):  # no program can pass
        return []
    defined: dict[str, int] = {}  # name -> rank; functions first
    for node in reference.body:
        if isinstance(node, ast.ClassDef):
            defined[node.name] = 0
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            defined[node.name] = 2
        elif isinstance(node, ast.Assign):
            rank = 2 if isinstance(node.value, ast.Lambda) else 1
            defined |= {t.id: rank for t in node.targets if isinstance(t, ast.Name)}
    by_rank = sorted(defined, key=lambda name: defined[name])

    def wanted(tree: ast.AST) -> str:
        mentioned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return next((name for name in reversed(by_rank) if name in mentioned), "")

    assertions = [wanted(node) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return list(dict.fromkeys(filter(None, assertions))) or list(filter(None, [wanted(tree)]))


def _indented(body: str) -> str:
    """Indent a function's body, even if its first line has lost its indentation."""
    first, *rest = body.strip("\n").split("\n")
    indents = [len(line) - len(line.lstrip(" ")) for line in rest if line.strip()]
    if indents and first == first.lstrip():
        shift = min(indents)
        if first.rstrip().endswith(":") and indents[0] == shift:  # the block that it opens
            shift = max(0, shift - 4)
        first = " " * shift + first
    return textwrap.indent(textwrap.dedent("\n".join([first, *rest, ""])), "    ")
