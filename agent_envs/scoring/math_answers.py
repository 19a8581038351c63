"""Whether two mathematical answers are equal, by math-verify, within a time limit.

math-verify (https://github.com/huggingface/Math-Verify) keeps its own time limit by signals, which
only a main thread may use, and symbolic algebra does not always listen; so it runs in a process of
its own that is killed when it takes too long.
"""

import atexit
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Final, cast

from agent_envs.core.deadline import call_with_deadline

SECONDS: Final = 10.0
"""How long a comparison may take; what takes longer is not equal."""
_JUDGE: Final = Path(__file__).with_name("math_judge.py")
_SPACING: Final = re.compile(r"\s+|\\[,;!: ]|\\left|\\right|\$")
_TEXT: Final = re.compile(r"\\(?:text|mbox|mathrm)\s*\{([^{}]*)\}")
_GSM8K_ANSWER: Final = re.compile(r"#### (-?[0-9.,]+)")


class MathJudge:
    """Compares answers in a process that it starts when first asked, and again after a kill."""

    def __init__(self, seconds: float = SECONDS) -> None:
        """Allow each comparison so many seconds."""
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = os.getpid()
        atexit.register(self.close)

    def is_equal(self, answer: str, gold: str) -> bool:
        """Return whether two answers mean the same: LaTeX, numbers, expressions, words."""
        if _plain(answer) == _plain(gold):
            return bool(_plain(answer))
        with self._lock:
            return self._ask(json.dumps({"gold": gold, "answer": answer}))

    def close(self) -> None:
        """Stop the process."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.communicate()

    def _ask(self, line: str) -> bool:
        process = self._running()
        questions, replies = cast(IO[str], process.stdin), cast(IO[str], process.stdout)
        try:
            questions.write(line + "\n")
            questions.flush()
            reply = call_with_deadline(replies.readline, self._seconds)
        except (TimeoutError, OSError):
            reply = ""
        if not reply:  # too slow, or out of memory: begin anew for the next question
            self.close()
        return str(reply).strip() == "true"

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # a fork must not share its parent's pipes
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own file
                [sys.executable, str(_JUDGE)], encoding="utf-8", errors="replace",
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return self._process


_judge: Final = MathJudge()


def math_equal(answer: str, gold: str) -> bool:
    """Return whether `answer` means the same as `gold`; see `MathJudge`."""
    return _judge.is_equal(answer, gold)


def gsm8k_match(answer: str, gold: str) -> float:
    """Return 1 if an answer is right by GSM8K's own rule, else 0.

    The number after ``####``, without commas, must be the very same text (Cobbe et al., 2021, arXiv
    2110.14168, ``grade_school_math/dataset.py``). An answer without the mark is read as the number.
    """
    found = _GSM8K_ANSWER.search(answer if "####" in answer else f"#### {answer.strip()}")
    return float(found is not None and found.group(1).replace(",", "") == gold.replace(",", ""))


def last_boxed(solution: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}`` of a solution; None if there is none."""
    start = max(solution.rfind(r"\boxed{"), solution.rfind(r"\fbox{"))
    if start < 0:
        return None
    begin, depth = solution.index("{", start) + 1, 1
    for i in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[i], 0)
        if depth == 0:
            return solution[begin:i]
    return None


def _plain(text: str) -> str:
    r"""Return an answer without spacing and ``\text``, as a quick first comparison."""
    return _SPACING.sub("", _TEXT.sub(r"\1", text)).replace("dfrac", "frac").rstrip(".")
