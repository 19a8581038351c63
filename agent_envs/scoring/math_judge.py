"""Compares mathematical answers, in a process of its own: run by `math_answers`, not imported.

Reads ``{"gold": ..., "answer": ...}`` lines, writes ``true`` or ``false`` lines. Symbolic algebra
may take for ever or eat all memory on a hostile answer; here it can be killed.
"""

import json
import logging
import signal
import sys
from typing import Any, Final

CPU_SECONDS: Final = 1.0
"""For a comparison: time of this process, so that a busy machine changes no verdict."""
MAX_MEMORY_BYTES: Final = 4 * 2**30


class _TooSlow(BaseException):
    """Passes through what math-verify and SymPy catch."""


def _stop(*_: object) -> None:
    raise _TooSlow


def main() -> None:
    """Answer questions until the input ends."""
    if sys.platform == "linux":  # elsewhere time is all that is limited
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

    read("1")  # what is imported late is no answer's time

    for line in sys.stdin:
        pair = json.loads(line)
        try:
            limit(CPU_SECONDS)
            is_equal = verify(read(pair["gold"]), read(pair["answer"]), timeout_seconds=None)
        except (Exception, _TooSlow):  # noqa: BLE001 - what cannot be compared is not equal
            is_equal = False
        limit(0.0)
        sys.stdout.write(f"{json.dumps(bool(is_equal))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
