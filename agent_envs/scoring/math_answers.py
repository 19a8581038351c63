r"""Equality of mathematical answers, by math-verify, within a time limit.

An answer must state one value: Markdown and formula delimiters are removed, one ``\boxed{}`` is the
answer whatever surrounds it, and several values, or a value next to other possible answers, are
wrong. So spaces count: ``3 4`` is not 34.

math-verify (https://github.com/huggingface/Math-Verify) limits its time by signals, which need the
main thread, and symbolic algebra does not always react to them; so it runs in a separate process
that is killed when it takes too long.
"""

import atexit
import base64
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, cast

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.scoring.math_text import (
    contained_formulas,
    has_operation,
    is_copied,
    is_number,
    latex,
    units_differ,
    without_asked_noun,
    without_unit,
)

SECONDS: Final = 60.0
"""Longest time of a comparison. The process stops itself after a second of processor time, so this
limit is for a busy machine."""
MAX_CHARS: Final = 1_000
"""A longer answer is right only if it is written exactly like the gold answer."""
MAX_WRITTEN_CHARS: Final = 20_000
"""A longer text around an answer is not searched for it."""
MAX_NESTED_BOXES: Final = 10
_JUDGE: Final = Path(__file__).with_name("math_judge.py")
_MARKDOWN: Final = re.compile(
    r"(?<![\w*)])(\*{1,3}|_{1,3}|`{1,3})(?=\S|\n)(.*?\S)\s*\1(?![\w*(])", re.S
)
_HEADING: Final = re.compile(
    r"\A(?:(?:#{1,6}|[*+])\s+)?(?:(?:the )?(?:final )?answer(?: is)?:?(?=\W)|=)?\s*", re.I
)
_FORMULA: Final = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S
)
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\b")
_NESTED_BOX: Final = re.compile(
    r"(\\(?:boxed|fbox)\{(?:[^{}]|\{[^{}]*\})*?)\\(?:boxed|fbox)\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_THOUSANDS: Final = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|,\\!)(?=\d{3}(?!\d))")
_FRACTION: Final = re.compile(r"frac\s*(\d)\s*(\d)")
_SPACING: Final = re.compile(r"(?<!\\)\\[,;!: ]|\\q?quad\b|(?<=\S)~")
_SIZES: Final = re.compile(
    r"\\(?:left|right|mathbf|bf)(?![a-zA-Z])|\\?\$|\\(?:begin|end)\{(?:equation|align|math)\*?\}"
)
_GAP: Final = re.compile(r"(?<![0-9A-Za-z.])\s+|\s+(?![0-9A-Za-z.])")
_TEXT: Final = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
_TABLE: Final = re.compile(r"\\begin\{.*\\end\{\w+\*?\}", re.S)
_ITEM: Final = re.compile(r"(?:\s*(?:,|\b(?:and|or)\b))+(?:\s*[A-Za-z]\s*=)?")
_CHOICE: Final = re.compile(r"\b(?:and|or|nor|not|either|neither|but|versus|vs|maybe|also)\b", re.I)
_SEVERAL: Final = re.compile(
    r"[\d.)}\]]\s+[.]?\d|(?<![\d.])0+\s+\\[dt]?frac|\n|\\\\|[|;&?~]|//|\.\.\.|\+$"
    r"|\\(?:approx|sim|to|(?:long)?rightarrow|implies)(?![a-z])|[^\x00-\x7f\w\u2264\u2265\u2260\xa2\xa3\xa5\u20ac\u20b9]",
    re.I,
)
_RELATION: Final = re.compile(
    r"[<>\u2264\u2265\u2260]|\\(?:not|n?(?:leq?|geq?)|[lg]eqslant|neq?|lt|gt)(?![a-z])"
)
_BRACKET: Final = re.compile(r"[(\[]|\\\{")
_OF_A_SET: Final = re.compile(r"[(\[=]|\\(?:in|cup|cap|infty)(?![a-z])")
_BASE: Final = re.compile(r"\d\s*_\s*\{?\s*(?!10\b)(\d+)")
_NUMBER: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_WORD: Final = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_NAME: Final = re.compile(r"[A-Za-z]\w*(?:\([a-z]\))?|[A-Za-z ]+")
_GSM8K_ANSWER: Final = re.compile(r"#### (-?[0-9.,]+)")


class MathJudge:
    """Judges answers in a process, started at the first request and again after a kill."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """Limit each comparison to `seconds`."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    def is_equal(
        self, answer: str, gold: str, *, question: str = "", wants_number: bool = False
    ) -> bool:
        """Return whether two answers mean the same: LaTeX, numbers, expressions, words.

        An expression of the `question` is no answer, unless it is the gold answer; nor is a sum or
        product where that is a number. With `wants_number`, it must be a number then.
        """
        if len(answer) > MAX_WRITTEN_CHARS:
            return answer.strip() == gold.strip()
        answer, written = latex(answer), latex(gold)
        gold = _formula(written)
        said = _stated_value(answer)
        if _plain(answer) == _plain(gold) or (said and _plain(said) == _plain(gold)):
            return bool(_plain(gold))
        if said is not None and "," in gold and not _BRACKET.match(gold):
            said = _ITEM.sub(",", f",{said}").lstrip(",")
        if said is None or len(said) > MAX_CHARS or not _states_one_value(said, gold):
            return False
        said = without_asked_noun(said, question)
        sides = [said] if "=" in gold else said.split("=")
        if len(sides) > 1 and _NAME.fullmatch(sides[0].strip()):
            del sides[0]  # x = 5
        value = sides[-1]
        if units_differ(value, written):
            return False
        is_open = not is_number(value) and (wants_number or has_operation(value))
        if (is_open and is_number(gold)) or is_copied(value, gold, question):
            return False
        with self._lock:
            copied = contained_formulas(value, question)
            return all(self._are_equal(side, gold) for side in sides) and not any(
                self._are_equal(formula, gold) for formula in copied
            )

    def score(self, rule: Callable[..., Any], **arguments: Any) -> float:
        """Return the score that a rule of a library computes; 0.0 if it fails or takes too long."""
        rule_and_arguments = base64.b64encode(pickle.dumps((rule, arguments))).decode()
        with self._lock:
            return float(self._ask({"rule": rule_and_arguments}))

    def close(self) -> None:
        """Stop the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _are_equal(self, answer: str, gold: str) -> bool:
        answer, gold = without_unit(answer), without_unit(gold)
        pair = {"gold": gold, "answer": answer}
        return _plain(answer) == _plain(gold) or self._ask(pair) is True

    def _ask(self, request: dict[str, str]) -> Any:
        """Return the reply of the process; False if there is none."""
        if self._owner != os.getpid():  # a fork must not share its parent's pipes
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own file
                # -P: the modules next to the file would hide those of the standard library
                [sys.executable, "-P", str(_JUDGE)], encoding="utf-8", errors="replace",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each needs memory
            )  # fmt: skip
        questions, replies = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            questions.write(json.dumps(request) + "\n")
            questions.flush()
            reply = call_with_deadline(replies.readline, self._seconds)
        except (TimeoutError, OSError):
            reply = ""
        if not reply:  # too slow, or out of memory: the next comparison starts a new process
            self.close()
        return json.loads(reply or "false")


math_equal: Final = MathJudge().is_equal
"""Compares answers in the process of the module; see `MathJudge.is_equal`."""


def gsm8k_match(answer: str, gold: str) -> float:
    """Return 1 if an answer is right by GSM8K's own rule, else 0.

    The number after ``####``, without commas, must be the very same text (Cobbe et al., 2021, arXiv
    2110.14168, ``grade_school_math/dataset.py``). An answer without the mark is read as the number.
    """
    found = _GSM8K_ANSWER.search(answer if "####" in answer else f"#### {answer.strip()}")
    return float(found is not None and found.group(1).replace(",", "") == gold.replace(",", ""))


def last_boxed(solution: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of a solution; None if there is none."""
    start = max(solution.rfind(r"\boxed{"), solution.rfind(r"\fbox{"))
    begin, depth = solution.find("{", start) + 1, 1
    for i in range(begin, len(solution) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(solution[i], 0)
        if depth == 0:
            return solution[begin:i]
    return None


def _stated_value(answer: str) -> str | None:
    """Return the formula or text that an answer states; None if it states several or none."""
    for _ in range(MAX_NESTED_BOXES):
        answer = _NESTED_BOX.sub(r"\1\2", answer)
    if starts := [match.start() for match in _BOX.finditer(answer)]:
        pairs = itertools.pairwise([*starts, len(answer)])
        boxed = {last_boxed(answer[i:j]) for i, j in pairs}
        said = boxed.pop()
        return None if boxed or said is None else _formula(said)
    if len(answer) > MAX_CHARS:
        return None
    text = _HEADING.sub("", _MARKDOWN.sub(r"\2", answer).strip())
    formulas = [next(filter(None, groups), "") for groups in _FORMULA.findall(text)]
    if not formulas:
        return _formula(text)
    around = _FORMULA.sub("", text)
    is_only = len(formulas) == 1 and not (_NUMBER.search(around) or _CHOICE.search(around))
    return _formula(formulas[0]) if is_only else None


def _formula(text: str) -> str:
    r"""Return a formula without layout commands: ``\$``, ``\left``, ``\,``."""
    text = _SPACING.sub(" ", _THOUSANDS.sub("", _FRACTION.sub(r"frac{\1}{\2}", text)))
    return _SIZES.sub("", text).strip().rstrip(".").strip()


def _states_one_value(said: str, gold: str) -> bool:
    """Return whether an answer states one value, or as many as the gold answer, and no more."""
    said, gold = _TABLE.sub("T", said), _TABLE.sub("T", gold)
    if said.count("{") != said.count("}") or "=" in said[-1:]:
        return False
    for several in (_CHOICE, _SEVERAL):
        if several.search(said) and not several.search(gold):
            return False
    if not set(_BASE.findall(said)) <= set(_BASE.findall(gold)):
        return False
    if _RELATION.search(said) and not (_RELATION.search(gold) or _OF_A_SET.search(gold)):
        return False  # less than 5 is not 5
    words = _WORD.findall(_TEXT.sub("", said))
    return not words or len(_NUMBER.findall(said)) <= max(1, len(_NUMBER.findall(gold)))


def _plain(text: str) -> str:
    r"""Return an answer without ``\text`` and needless space, as a quick first comparison."""
    text = _TEXT.sub(r"\1", _formula(text)).replace("dfrac", "frac").strip()
    return _GAP.sub("", " ".join(text.split()))  # of several spaces one counts
