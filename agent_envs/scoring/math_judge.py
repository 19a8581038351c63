"""Compares mathematical answers, in a process of its own: run by `math_answers`, not imported.

Reads ``{"gold": ..., "answer": ...}`` lines, writes ``true`` or ``false`` lines. Symbolic algebra
may take for ever or eat all memory on a hostile answer; here it can be killed.
"""

import json
import logging
import sys
from typing import Any, Final

SECONDS: Final = 3
"""For parsing an answer, and for comparing two; math-verify keeps to it where it can."""
MAX_MEMORY_BYTES: Final = 4 * 2**30
MAX_CHARS: Final = 1_000


def main() -> None:
    """Answer questions until the input ends."""
    if sys.platform == "linux":  # elsewhere time is all that is limited
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def read(text: str) -> Any:
        has_mark = any(mark in text for mark in ("$", r"\boxed", r"\(", r"\["))
        return parse(text if has_mark else f"${text}$", parsing_timeout=SECONDS)

    for line in sys.stdin:
        pair = json.loads(line)
        try:
            answer = pair["answer"]
            is_equal = len(answer) <= MAX_CHARS and verify(
                read(pair["gold"]), read(answer), timeout_seconds=SECONDS
            )
        except Exception:  # noqa: BLE001 - what cannot be compared is not equal
            is_equal = False
        sys.stdout.write(f"{json.dumps(bool(is_equal))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
