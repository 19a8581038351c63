"""Process that judges answers: run by `math_answers`, not imported.

It reads ``{"gold": ..., "answer": ...}`` lines and writes ``true`` or ``false`` lines; for lines
``{"rule": ...}``, a pickled function with its arguments, it writes the score. Symbolic algebra may
run forever or use all memory on a hostile answer; a process can be killed.
"""

import base64
import json
import logging
import pickle
import signal
import sys
from typing import Any, Final

CPU_SECONDS: Final = 1.0
"""Processor time of a request, so that a busy machine changes no verdict."""
MAX_MEMORY_BYTES: Final = 4 * 2**30


class _TooSlow(BaseException):
    """The time is up; math-verify and SymPy do not catch it."""


def _stop(*_: object) -> None:
    raise _TooSlow


def main() -> None:
    """Answer questions until the input ends."""
    if sys.platform == "linux":  # elsewhere only time is limited
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        signal.signal(signal.SIGPROF, _stop)
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def read(text: str) -> Any:
        return parse(f"${text}$", parsing_timeout=None)

    def limit(seconds: float) -> None:
        if sys.platform == "linux":
            # The second one ends the process, in a long operation that Python cannot interrupt.
            signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)

    # Late imports do not count as time of an answer.
    verify(read("x^2-1"), read("(x-1)(x+1)"), timeout_seconds=None)

    replies, sys.stdout = sys.stdout, sys.stderr  # a rule may print
    for line in sys.stdin:
        request = json.loads(line)
        result: bool | float = False
        rule, arguments = None, {}
        if "rule" in request:  # its imports do not count either
            rule, arguments = pickle.loads(base64.b64decode(request["rule"]))  # noqa: S301 - ours
        try:
            limit(CPU_SECONDS)
            if rule is not None:
                result = float(rule(**arguments))
            else:
                gold, answer = read(request["gold"]), read(request["answer"])
                result = bool(verify(gold, answer, timeout_seconds=None))
        except (Exception, _TooSlow):  # noqa: BLE001 - what cannot be judged is wrong
            result = False
        limit(0.0)
        replies.write(f"{json.dumps(result)}\n")
        replies.flush()


if __name__ == "__main__":
    main()
