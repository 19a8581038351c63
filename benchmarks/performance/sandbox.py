"""Costs of sandboxed programs compared with a bare Python, and what programs leave behind.

::

    python -m benchmarks.performance.sandbox --output sandbox.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from agent_envs.data.files import write_json
from agent_envs.sandbox import Sandbox, open_sandbox
from benchmarks.performance.interleaved import measure_interleaved, seconds_of


def measure(sandbox: Sandbox, *, rounds: int, leak_runs: int) -> dict[str, Any]:
    """Return medians of `rounds`, and what `leak_runs` programs leave behind."""
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
        "leak_check": _check_leaks(sandbox, leak_runs),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--level", default="strong", help="strong, container or limits")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--leak_runs", type=int, default=1_000)
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    with open_sandbox(options.level) as sandbox:
        report = measure(sandbox, rounds=options.rounds, leak_runs=options.leak_runs)
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


def _check_leaks(sandbox: Sandbox, runs: int) -> dict[str, int]:
    """Return how many processes, files, descriptors and mounts the runs add."""
    _run_trivial(sandbox)
    before = _count()
    for number in range(runs):
        sandbox.run_shell("sleep 100 & echo left > behind")
        if number % 10 == 0:
            sandbox.run_python("import os\nif os.fork() == 0: os.setsid(); input()")
    time.sleep(1.0)  # the last supervisor may still be ending
    after = _count()
    return {"runs": runs} | {name: after[name] - before[name] for name in before}


def _count() -> dict[str, int]:
    folders = ("/tmp", "/dev/shm", "/var/tmp")  # noqa: S108
    depth = _namespace_depth(Path("/proc/self"))
    return {
        # in namespaces below ours: processes of other users come and go
        "processes": sum(_namespace_depth(p) > depth for p in Path("/proc").glob("[0-9]*")),
        "files": sum(1 for f in folders for _ in Path(f).glob("agent-envs-*")),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
    }


def _namespace_depth(process: Path) -> int:
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next(len(line.split()) for line in lines if line.startswith("NSpid:"))


if __name__ == "__main__":
    main()
