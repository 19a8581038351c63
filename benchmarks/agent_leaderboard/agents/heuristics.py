"""Rule-based agents: one for each kind of tool.

Each is a function of the question and the tool results so far, and returns the next action. They
show how much of an environment a few rules solve.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from agent_envs.core.tool_env import ToolEnv
from agent_envs.retrieval import STOP_WORDS

_NUMBER: Final = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_EXPRESSION: Final = re.compile(r"[\d(][\d\s().+*/-]*[+*/-][\d\s().+*/-]*\d\)*")
_OPERATIONS: Final[Mapping[type[ast.operator], tuple[str, Callable[[int, int], int]]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
}
_DOCTEST: Final = re.compile(r"^\s*>>> .*\n\s*(\S.*)$", re.MULTILINE)
_ARROW: Final = re.compile(r"\)\s*(?:==|=>|->|➞|should return|returns)\s*(\S.*)$", re.MULTILINE)
_DEFINED: Final = re.compile(r"^def (\w+)\(", re.MULTILINE)
_ASSERTED: Final = re.compile(r"assert\s*\(*\s*(?:\w+\()?(\w+)\(.*?==\s*(.+)$", re.MULTILINE)
_LOOK_UPS: Final = re.compile(r"\bthe (\w+)")

UNKNOWN: Final = "unknown"
# "will" may be a name here; results that were published hold the others.
_STOP_WORDS: Final = (STOP_WORDS - {"but", "s", "will"}) | {"both", "into", "same", "than"}
_WORD: Final = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")
_HIT: Final = re.compile(r"^\[\d+\] (.*)$", re.MULTILINE)
_CHOICE: Final = re.compile(r"[,:]\s*(?:the\s+)?([^,?]+?),?\s+or\s+(?:the\s+)?([^,?]+?)\s*\?*$")
_YES_NO: Final = re.compile(
    r"(?:are|is|was|were|do|does|did|has|have|had|can|could|will|would)\b", re.IGNORECASE
)
_MONTH: Final = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
)
_DATE: Final = re.compile(rf"\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}")
_YEAR: Final = re.compile(r"\b1\d{3}\b|\b20\d{2}\b")
_QUANTITY: Final = re.compile(r"\b\d[\d,]*(?:\.\d+)?\b")
_NAME: Final = re.compile(
    r"[A-ZÀ-ÖØ-Þ][\w'\u2019.-]*(?:\s+(?:(?:of|the|de|van|von|and|la|le)\s+)*[A-ZÀ-ÖØ-Þ][\w'\u2019-]*)*"
)

SHELL_COMMANDS: Final = ("ls -R", "find . -type f -exec head -n 3 {} +")
GAME_COMMANDS: Final = (
    "look", "inventory", "take all", "go north", "take all", "go east", "take all", "go south",
    "take all", "go west", "take all",
)  # fmt: skip


def next_action(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Return the next action; `results` are the observations since the question."""
    for tool, act in RULES.items():
        if tool in env.tools:
            return act(env, question, results)
    return env.write_answer(_calculated(question) or _summed(question))


def _search(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Search with the question, then extract an answer from the top passages."""
    if not results:
        (argument,) = env.tools["search"].parameters["properties"]
        return env.write_call("search", **{argument: question})
    return env.write_answer(extract_answer(question, results[0]))


def _calculator(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Calculate the question's formula, or with all its numbers; answer with the result."""
    if results:
        return env.write_answer(results[-1].strip() or "0")
    return env.write_call("calculator", expression=_formula(question))


def _program(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Answer with a function that always returns what the example shows."""
    program = constant_program(question)
    return env.write_answer(program) if results else env.write_call("run_tests", code=program)


def _shell(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    if len(results) < len(SHELL_COMMANDS):
        return env.write_call("shell", command=SHELL_COMMANDS[len(results)])
    return env.write_answer("done")


def _game(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    return env.write_call("act", command=GAME_COMMANDS[len(results) % len(GAME_COMMANDS)])


def _calculate(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Evaluate the formula, one operation per call."""
    calls = _operations(question, results)
    if len(results) < len(calls):
        return env.write_call("calculate", **calls[len(results)])
    return env.write_answer(results[-1] if results else UNKNOWN)


def _look_up(env: ToolEnv, question: str, results: Sequence[str]) -> str:
    """Read "the A of the B of the C" from its end: look C up in B, and that in A."""
    *tables, key = _LOOK_UPS.findall(question) or [UNKNOWN]
    if len(results) == len(tables):
        return env.write_answer(results[-1] if results else UNKNOWN)
    table = tables[::-1][len(results)]
    return env.write_call("look_up", table=table, key=results[-1] if results else key)


RULES: Final[Mapping[str, Callable[[ToolEnv, str, Sequence[str]], str]]] = {
    "search": _search,
    "calculator": _calculator,
    "run_tests": _program,
    "shell": _shell,
    "act": _game,
    "calculate": _calculate,
    "look_up": _look_up,
}
"""Rules by the tool of the environment."""


def constant_program(question: str) -> str:
    """Return a program whose function always returns what the example in the question shows."""
    if asserted := _ASSERTED.search(question):
        name, value = asserted.groups()
    else:
        name = (_DEFINED.findall(question) or ["answer"])[-1]
        shown = _DOCTEST.search(question) or _ARROW.search(question)
        value = shown.group(1) if shown else "None"
    return f"def {name}(*arguments, **options):\n    return {_literal(value)}\n"


def _literal(text: str) -> str:
    """Return the Python literal that a text begins with; ``None`` if there is none."""
    for end in range(len(text), 0, -1):
        try:
            return repr(ast.literal_eval(text[:end].strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return "None"


def _formula(question: str) -> str:
    """Return the question's formula, or its numbers with an operator that its words suggest."""
    if expression := _EXPRESSION.search(question):
        return expression.group().strip()
    numbers = [number.replace(",", "") for number in _NUMBER.findall(question)][:4] or ["0"]
    asked = question.lower()
    if re.search(r"\b(?:left|remain|remaining|fewer|change)\b", asked):
        return " - ".join(numbers)
    if re.search(r"\b(?:each|per|every|times|twice)\b", asked):
        return " * ".join(numbers[:2])
    return " + ".join(numbers)


def _calculated(question: str) -> str | None:
    """Return the value of a formula of whole numbers in the question."""
    results: list[str] = []
    while len(calls := _operations(question, results)) > len(results):
        call = calls[len(results)]
        apply = dict(_OPERATIONS.values())[call["operation"]]
        results.append(str(apply(call["a"], call["b"])))
    return results[-1] if results else None


def _summed(question: str) -> str:
    numbers = [float(number.replace(",", "")) for number in _NUMBER.findall(question)]
    return f"{sum(numbers):g}"


def _operations(question: str, results: Sequence[str]) -> list[dict[str, Any]]:
    """Return the calls that evaluate the question's integer formula with ``+ - *``.

    Calls that need missing results take 0 for them.
    """
    found = _EXPRESSION.search(question)
    try:
        tree = ast.parse(found.group().strip() if found else "", mode="eval").body
    except SyntaxError:
        return []
    calls: list[dict[str, Any]] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            a, b = value(node.left), value(node.right)
            calls.append({"a": a, "operation": _OPERATIONS[type(node.op)][0], "b": b})
            known = results[len(calls) - 1] if len(calls) <= len(results) else "0"
            return int(known) if re.fullmatch(r"-?\d+", known) else 0
        return node.value if isinstance(node, ast.Constant) and type(node.value) is int else 0

    value(tree)
    return calls


# Answers from passages: the question's words give the expected kind of answer (yes or no, one of
# two, a date, a number, a name); the best one is in the sentence that shares most words with it.

Candidates = Iterator[tuple[float, str]]
Finder = Callable[[str, str], Candidates]


def extract_answer(question: str, passages: str) -> str:
    """Return the most likely answer from search results, or `UNKNOWN`."""
    if choice := _CHOICE.search(question):
        return _earlier(passages, *choice.groups())
    if _YES_NO.match(question.strip()):
        return "yes"
    for find in (*_finders(question.lower()), _names, _rare_words):
        candidates = list(find(question, passages))
        if candidates:
            return max(candidates, key=lambda candidate: candidate[0])[1]
    return UNKNOWN


def _finders(question: str) -> Sequence[Finder]:
    """Return finders for the expected kind of answer, the most reliable first."""
    if re.search(r"\b(?:what|which) year\b", question):
        return (_matches(_YEAR),)
    if re.search(r"\bwhen\b|\b(?:what|which) date\b|\bdate of (?:birth|death)\b", question):
        return (_matches(_DATE), _matches(_YEAR))
    if re.search(r"\bhow (?:many|much|old|far|long|tall|large)\b|\bwhat number\b", question):
        return (_matches(_QUANTITY),)
    return ()


def _matches(pattern: re.Pattern[str]) -> Finder:
    def find(question: str, passages: str) -> Candidates:
        for score, sentence in _scored_sentences(question, passages):
            for match in pattern.finditer(sentence):
                if match.group() not in question:
                    yield score, match.group()

    return find


def _names(question: str, passages: str) -> Candidates:
    """Yield capitalised names that are not in the question; full names first for a "who"."""
    asked = question.lower()
    wants_person = re.search(r"\bwho(?:m|se)?\b", asked) is not None
    for score, sentence in _scored_sentences(question, passages):
        for match in _NAME.finditer(sentence):
            name = match.group().strip(" .,'-\u2019")
            if not name or name.lower() in asked or name.lower() in _STOP_WORDS:
                continue
            yield score + 0.5 * (wants_person and " " in name), name


def _rare_words(question: str, passages: str) -> Candidates:
    """Yield words of each sentence that are not in the question: for lower-case text."""
    for score, sentence in _scored_sentences(question, passages):
        known = set(_words(question)) | _STOP_WORDS
        words = [word for word in _words(sentence) if word not in known]
        if words:
            yield score, " ".join(words[-2:])


def _scored_sentences(question: str, passages: str) -> Iterator[tuple[float, str]]:
    """Yield each sentence with its overlap with the question; earlier ones win ties."""
    asked = set(_words(question)) - _STOP_WORDS
    position = 0
    for title, text in _hits(passages):
        in_title = len(asked & set(_words(title)))
        for sentence in _SENTENCE.split(text):
            position += 1
            yield len(asked & set(_words(sentence))) + in_title - 0.01 * position, sentence


def _hits(passages: str) -> Iterable[tuple[str, str]]:
    parts = _HIT.split(passages)
    if len(parts) == 1:
        return [("", passages)]
    return zip(parts[1::2], parts[2::2], strict=True)


def _earlier(passages: str, first: str, second: str) -> str:
    """Return which of two things the passages mention first; the first where they mention none."""
    text = passages.lower()
    places = {choice: text.find(choice.lower()) for choice in (first, second)}
    found = [choice for choice in (first, second) if places[choice] >= 0]
    return min(found, key=lambda choice: places[choice], default=first)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
