"""Costs of sandboxed programs compared with a bare Python.

::

    python -m benchmarks.performance.sandbox --output sandbox.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agent_envs.data.files import write_json
from agent_envs.sandbox import Sandbox, open_sandbox
from benchmarks.performance.interleaved import measure_interleaved, seconds_of


def measure(sandbox: Sandbox, *, rounds: int) -> dict[str, Any]:
    """Return medians of `rounds`."""
    sides = {
        "bare": lambda: seconds_of(_run_bare_python),
        "sandboxed": lambda: seconds_of(_run_trivial, sandbox),
    }
    times = measure_interleaved(sides, rounds, description="bare vs sandboxed")
    bare, sandboxed = map(statistics.median, times.values())
    with sandbox.session() as session:
        calls = [seconds_of(session.run, "1") for _ in range(rounds)]
    return {
        "level": sandbox.level,
        "bare_python_ms": bare * 1e3,
        "sandboxed_ms": sandboxed * 1e3,
        "ratio": sandboxed / bare,
        "session_call_ms": statistics.median(calls) * 1e3,
        "programs_per_second_1_thread": _throughput(sandbox, rounds, threads=1),
        "programs_per_second_2_threads": _throughput(sandbox, rounds, threads=2),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", default="strong", help="strong, container or limits")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    with open_sandbox(options.level) as sandbox:
        report = measure(sandbox, rounds=options.rounds)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.output:
        write_json(options.output, report)


def _run_bare_python() -> None:
    executable = os.path.realpath(sys.executable)
    subprocess.run([executable, "-I", "-S", "-c", "pass"], check=True)  # noqa: S603


def _run_trivial(sandbox: Sandbox) -> None:
    if sandbox.run_python("pass").status != "ok":
        raise RuntimeError("the trivial program failed")


def _throughput(sandbox: Sandbox, count: int, *, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        return count / seconds_of(lambda: list(pool.map(_run_trivial, [sandbox] * count)))


if __name__ == "__main__":
    main()
