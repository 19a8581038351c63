"""Kill a training run again and again, resume it, and compare it with one that nobody touched.

::

    python -m benchmarks.kill_test --output kill_test.json

The kills are ``kill -9`` at random moments: some while the process starts, the others at a random
step plus a random part of the time that a step takes, so that some hit the writing of a checkpoint.
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

SHARE_AT_START: Final = 0.2
TIMES: Final = ("time", "seconds", "per_second")
WEIGHTS: Final = ("model.safetensors", "critic.safetensors")


def compare(arguments: Sequence[str], *, steps: int, kills: int, seed: int) -> dict[str, Any]:
    """Run a job of ``agent-r1-train`` untouched, and killed so often; compare what came of it."""
    job = [sys.executable, "-m", "agent_trainers.cli.train", *arguments]
    job += ["--max_steps", str(steps), "--save_steps", "1"]
    with tempfile.TemporaryDirectory(prefix="kill-test-") as name:
        whole, killed = Path(name) / "whole", Path(name) / "killed"
        started = time.perf_counter()
        _finish(job, whole, "--output_dir", str(whole))
        seconds = time.perf_counter() - started
        rng = np.random.default_rng(seed)
        moments = sorted(rng.integers(1, steps, size=kills).tolist())
        done = [
            _kill_once(job, killed, step, rng, seconds / (2 * steps))
            for step in tqdm(moments, desc="killing", unit="kill")
        ]
        _finish(job, killed, "--output_dir", str(killed), "--resume")
        return {
            "steps": steps,
            "seed": seed,
            "kills": done,
            "num_kills_while_saving": sum(kill["while_saving"] for kill in done),
            "num_kills_while_starting": sum(kill["while_starting"] for kill in done),
            "same_weights": _weights(whole) == _weights(killed),
            "same_log": _log(whole) == _log(killed),
            "same_results": _results(whole) == _results(killed),
            "unfinished_left": (killed / UNFINISHED).exists(),
        }


def main() -> None:
    """Run, print, and write JSON; fail if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where to write the result as JSON")
    options, arguments = parser.parse_known_args()
    report = compare(arguments, steps=options.steps, kills=options.kills, seed=options.seed)
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if options.output:
        write_json(options.output, report)
    if not (report["same_weights"] and report["same_log"] and report["same_results"]):
        sys.exit("The killed run ended elsewhere.")


def _kill_once(
    job: Sequence[str], folder: Path, step: int, rng: np.random.Generator, step_seconds: float
) -> dict[str, Any]:
    """Start or resume the job and kill it, while it starts or a moment after a step is saved."""
    before = _newest_step(folder)
    at_start = rng.random() < SHARE_AT_START
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
        raise RuntimeError("The job was over before it could be killed: give it more --steps.")
    after = _newest_step(folder)
    return {
        "after_step": after,  # the newest checkpoint then; 0 before the first
        "while_starting": after == before,  # it had not yet made a step of its own
        "while_saving": any((folder / UNFINISHED).glob("checkpoint-*")),
    }


def _finish(job: Sequence[str], folder: Path, *options: str) -> None:
    done = subprocess.run(  # noqa: S603 - this interpreter, our own module
        [*job, *options], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"The job in {folder} failed:\n{done.stderr[-3000:]}")


def _newest_step(folder: Path) -> int:
    steps = [path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")]
    return max((int(step) for step in steps), default=0)


def _weights(folder: Path) -> dict[str, str]:
    paths = [folder / name for name in WEIGHTS if (folder / name).exists()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _log(folder: Path) -> str:
    """Return what was logged at each step, without times, as JSON (where NaN equals NaN)."""
    checkpoint = find_checkpoint(folder).checkpoint
    if checkpoint is None:
        raise RuntimeError(f"{folder} holds no checkpoint that is whole.")
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    entries = [
        {name: value for name, value in entry.items() if not any(t in name for t in TIMES)}
        for entry in state["log_history"]
    ]
    return json.dumps(entries)


def _results(folder: Path) -> dict[str, Any]:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    names = ("success_before", "success_after", "return_before", "return_after", "steps")
    return {name: results[name] for name in names}


if __name__ == "__main__":
    main()
