"""Process that compares mathematical answers: run by `math_answers`, not imported.

It reads ``{"gold": ..., "answer": ...}`` lines and writes ``true`` or ``false`` lines. Symbolic
algebra may run forever or use all memory on a hostile answer; a process can be killed.
"""

import json
import logging
import signal
import sys
from typing import Any, Final

CPU_SECONDS: Final = 1.0
"""Processor time of a comparison, so that a busy machine changes no verdict."""
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

    read("1")  # late imports do not count as time of an answer

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
