"""Kill a training run repeatedly, resume it, and compare it with an uninterrupted run.

::

    python -m benchmarks.kill_test --output kill_test.json

The kills are ``kill -9`` at random moments: some during start-up, the others at a random step plus
a random part of a step's time, so that some hit the writing of a checkpoint.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm.auto import tqdm

from agent_envs.data.files import write_json
from agent_trainers.checkpointing.checkpoints import UNFINISHED, find_checkpoint

STARTUP_SHARE: Final = 0.2
_TIMES: Final = ("time", "seconds", "per_second")
_RESULTS: Final = ("success_before", "success_after", "return_before", "return_after", "steps")


def compare(arguments: Sequence[str], *, steps: int, kills: int, seed: int) -> dict[str, Any]:
    """Run a job of ``agent-r1-train`` uninterrupted and with kills; compare the outcomes."""
    job = [sys.executable, "-m", "agent_trainers.cli.train", *arguments]
    job += ["--max_steps", str(steps), "--save_steps", "1"]
    with tempfile.TemporaryDirectory(prefix="kill-test-") as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        started = time.perf_counter()
        _finish([*job, "--output_dir", str(whole)])
        seconds = time.perf_counter() - started
        rng = np.random.default_rng(seed)
        moments = sorted(rng.integers(1, steps, size=kills).tolist())
        done = [
            _kill_once(job, killed, step, rng, seconds / (2 * steps))
            for step in tqdm(moments, desc="killing", unit="kill")
        ]
        _finish([*job, "--output_dir", str(killed), "--resume"])
        outcomes = {"same_weights": _weights, "same_log": _log, "same_results": _results}
        return {
            "steps": steps,
            "seed": seed,
            "kills": done,
            "num_kills_while_saving": sum(kill["while_saving"] for kill in done),
            "num_kills_while_starting": sum(kill["while_starting"] for kill in done),
            **{name: read(whole) == read(killed) for name, read in outcomes.items()},
            "unfinished_left": (killed / UNFINISHED).exists(),
        }


def main() -> None:
    """Run the command; further options are those of ``agent-r1-train``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file of the result")
    options, arguments = parser.parse_known_args()
    report = compare(arguments, steps=options.steps, kills=options.kills, seed=options.seed)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.output:
        write_json(options.output, report)
    if not (report["same_weights"] and report["same_log"] and report["same_results"]):
        sys.exit("kill_test: the killed run has another outcome.")


def _kill_once(
    job: Sequence[str], folder: Path, step: int, rng: np.random.Generator, step_seconds: float
) -> dict[str, Any]:
    """Start or resume the job, and kill it at start-up or shortly after a step is saved."""
    before = _newest_step(folder)
    at_start = rng.random() < STARTUP_SHARE
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
        [*job, "--output_dir", str(folder), "--resume"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if at_start:
        time.sleep(rng.uniform(0, 5))
    else:
        while _newest_step(folder) < max(step, before + 1) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, step_seconds))
    process.kill()
    if process.wait() == 0:
        raise RuntimeError("The job finished before it was killed: increase --steps.")
    after = _newest_step(folder)
    return {
        "after_step": after,  # 0 before the first checkpoint
        "while_starting": after == before,
        "while_saving": any((folder / UNFINISHED).glob("checkpoint-*")),
    }


def _finish(job: Sequence[str]) -> None:
    done = subprocess.run(job, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(job)} failed:\n{done.stderr[-3000:]}")


def _newest_step(folder: Path) -> int:
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(step) for step in steps), default=0)


def _weights(folder: Path) -> dict[str, str]:
    paths = [p for n in ("model", "critic") if (p := folder / f"{n}.safetensors").exists()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _log(folder: Path) -> str:
    """Return the logged metrics without times, as JSON, in which NaN equals NaN."""
    checkpoint = find_checkpoint(folder).checkpoint
    if checkpoint is None:
        raise RuntimeError(f"{folder} contains no complete checkpoint.")
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return json.dumps([
        {name: value for name, value in entry.items() if not any(t in name for t in _TIMES)}
        for entry in state["log_history"]
    ])  # fmt: skip


def _results(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {name: results[name] for name in _RESULTS}


if __name__ == "__main__":
    main()
