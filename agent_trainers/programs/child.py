"""Runs one episode of a function as a process: ``python -m agent_trainers.programs.child mod:run``.

See `agent_trainers.programs.runners` for what it reads and writes.
"""

import dataclasses
import json
import os
import reprlib
import sys
from typing import Any

import numpy as np

from agent_envs.core.async_bridge import resolve
from agent_trainers.programs.program import Outcome, ProgramSession, find_program
from agent_trainers.programs.runners import SEED_VARIABLE


def main() -> None:
    """Run the function that the command line names."""
    # What it prints is for people; the outcome goes where it was to be written.
    outcome = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    session = ProgramSession(
        base_url=os.environ["OPENAI_BASE_URL"],
        key=os.environ["OPENAI_API_KEY"],
        seed=int(os.environ[SEED_VARIABLE]),
    )
    value = resolve(find_program(sys.argv[1])(session, task))
    with outcome:
        outcome.write("\n" + json.dumps(value, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Outcome):
        return dataclasses.asdict(value)
    if isinstance(value, np.number | np.bool_):
        return value.item()
    raise TypeError(f"a program cannot return {reprlib.repr(value)}: it cannot be written as JSON.")


if __name__ == "__main__":
    main()
