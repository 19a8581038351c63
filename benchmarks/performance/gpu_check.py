"""Measure training on the GPUs of this machine: ``make gpu-check``.

Takes a few optimiser steps in every way that the machine allows, by the launcher: generation by
transformers, by a colocated vLLM (with sleep mode, too) and by vLLM's server, and FSDP2. Throughput
by phase, utilisation, memory and drift go to ``benchmarks/results/gpu_check.json``, one entry per
device, of which the page "LoRA, multi-GPU and vLLM" makes its table. Without a GPU the same code
runs with the embedded policy.
"""

import contextlib
import datetime
import functools
import importlib.util
import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tqdm.auto import tqdm

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.results import versions
from agent_trainers.trainers.extensions import Extension
from benchmarks.agent_leaderboard.report.visible_text import markdown_table
from benchmarks.grid import CommandFailedError, Grid, read_json
from benchmarks.performance.interleaved import seconds_of
from benchmarks.performance.models import PEAK_FLOPS, load_model, load_tokenizer

NUM_EPISODES: Final = 64
"""Episodes of an optimiser step, over all processes."""
SERVER: Final = "vLLM, server"
SERVER_SECONDS: Final = 300
PHASES: Final = ("rollout", "score", "train")
DRIFT: Final = "sampling/sampling_logp_difference/max"
MODEL: Final = "0.5B"
RESULTS: Final = Path("benchmarks/results/gpu_check.json")
COLUMNS: Final = (
    "generation", "sampled tokens/s", "trained tokens/s", "MFU",
    "seconds of rollout / credit / training", "peak GiB", "largest drift",
)  # fmt: skip
_SHARED: Final = (
    "--env", "AgentR1/SyntheticMultiHop-v0", "--num_eval_tasks", "0", "--steps_per_generation", "1",
    "--max_completion_length", "48", "--max_logprob_drift", "100", "--save_strategy", "no",
    "--seed", "7", "--vllm_max_model_length", "1024",
    "--extensions", "benchmarks.performance.gpu_check:Meter",
)  # fmt: skip
_COLOCATED: Final = (
    "--use_vllm", "--vllm_mode", "colocate", "--vllm_gpu_memory_utilization", "0.3",
)  # fmt: skip
_ENGINE: Final = ("--max-model-len", "1024", "--logprobs-mode", "processed_logprobs")
_ENGINE_ON_CPU: Final = (
    "--enforce-eager", "--no-enable-chunked-prefill", "--dtype", "float32",
    "--worker-extension-cls", "agent_trainers.policies.cpu_weights.GlooWorker",
)  # fmt: skip

ENVIRONMENT_ON_CPU: Final = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class Meter(Extension):
    """Adds the number of parameters and the peak memory of the first process to the results."""

    def results(self) -> Mapping[str, Any]:
        """Return both; on a GPU the memory that torch reserved, else that of the process."""
        on_gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
        return {
            "num_parameters": sum(p.numel() for p in self.trainer.model.parameters()),
            "peak_bytes": on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def ways(num_gpus: int, *, has_vllm: bool) -> dict[str, tuple[str, ...] | str]:
    """Return the options of each way to train, or the reason why it cannot be measured here."""
    no_gpu = "" if num_gpus else "needs a GPU"
    no_second = "needs a second GPU" if num_gpus == 1 else ""
    no_vllm = "" if has_vllm else "needs vLLM, which `make gpu-check` installs"
    sleeping = (*_COLOCATED, "--vllm_enable_sleep_mode", "true")
    found: dict[str, tuple[tuple[str, ...], str]] = {
        "transformers": ((), ""),
        "vLLM, colocated": (_COLOCATED, no_vllm),
        "vLLM, colocated, sleep mode": (sleeping, no_vllm or no_gpu),
        SERVER: (("--use_vllm", "--vllm_mode", "server"), no_vllm or no_second),
        "FSDP2, vLLM colocated": (("--accelerate_config", "fsdp2", *_COLOCATED), no_vllm or no_gpu),
    }
    return {way: missing or options for way, (options, missing) in found.items()}


def measure(grid: Grid, way: str, options: Sequence[str], model: str, steps: int) -> dict[str, Any]:
    """Train for `steps` steps and a first one to warm up; return the figures of a way."""
    num_gpus = torch.cuda.device_count()
    folder = grid.work / re.sub(r"\W+", "_", way)
    is_sharded = "--accelerate_config" in options
    num_processes = num_gpus if is_sharded else 1
    command = [
        "agent-r1-train", *_SHARED, *options, "--model", model, "--max_steps", str(steps + 1),
        "--output_dir", str(folder / "run"), "--overwrite",
        "--per_device_train_batch_size", str(NUM_EPISODES // num_processes),
        *(("--num_processes", str(num_processes)) if is_sharded else ()),
        "--use_cpu", str(not num_gpus), "--bf16", str(bool(num_gpus)),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        if way == SERVER:
            url = stack.enter_context(serve(model, folder))
            command += ["--vllm_server_base_url", url, "--vllm_group_port", str(free_port())]
        grid.command(command, folder)
    results = json.loads((folder / "run" / "results.json").read_text(encoding="utf-8"))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "time/rollout_seconds" in row][1:]
    return summarise(rows, results["num_parameters"], results["peak_bytes"], num_processes)


def summarise(
    rows: Sequence[Mapping[str, float]], num_parameters: int, peak_bytes: int, num_processes: int
) -> dict[str, Any]:
    """Return the figures of a run, from the logged metrics of its steps: medians over the steps."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    trained = median("rows/tokens_per_second")
    sampled = [
        NUM_EPISODES * r["completions/mean_length"] / r["time/rollout_seconds"] for r in rows
    ]
    return {
        "sampled_tokens_per_second": statistics.median(sampled),
        "trained_tokens_per_second": trained,
        # forward and backward take six operations per parameter and token
        "utilisation": 6 * num_parameters * trained / (peak_flops() * num_processes),
        **{f"{name}_seconds": median(f"time/{name}_seconds") for name in PHASES},
        "peak_gib": peak_bytes / 2**30,
        "drift": max(row[DRIFT] for row in rows),
    }


@functools.cache
def peak_flops() -> float:
    """Return operations per second: of the data sheet, else of a large product of matrices."""
    is_gpu = torch.cuda.is_available()
    for part, flops in PEAK_FLOPS.items() if is_gpu else ():
        if part in torch.cuda.get_device_name():
            return flops
    size, dtype = (8192, torch.bfloat16) if is_gpu else (2048, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device="cuda" if is_gpu else "cpu")

    def multiply() -> None:
        (matrix @ matrix)[0, 0].item()  # waits for the device

    multiply()
    return 2 * size**3 / min(seconds_of(multiply) for _ in range(5))


@contextlib.contextmanager
def serve(model: str, folder: Path) -> Iterator[str]:
    """Run vLLM's server on the last GPU, or the CPU; yields its address."""
    num_gpus, port = torch.cuda.device_count(), free_port()
    backend = "nccl" if num_gpus else "gloo"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
        "--port", str(port), *_ENGINE, *(() if num_gpus else _ENGINE_ON_CPU),
        "--weight-transfer-config", json.dumps({"backend": backend}),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    if num_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = str(num_gpus - 1)
    folder.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    with (folder / "server.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)  # noqa: S603
        try:
            for _ in range(SERVER_SECONDS):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):  # noqa: S310
                    break
                if process.poll() is not None:
                    raise CommandFailedError(f"vLLM's server ended; see {log.name}")
                time.sleep(1)
            else:
                raise CommandFailedError(f"vLLM's server does not answer; see {log.name}")
            yield url
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        help="a model's folder or name (default: on a GPU 0.5 billion random weights in the shape "
        "of Qwen2.5-0.5B, on a CPU the embedded policy)",
    )
    parser.add_argument(
        "--steps", type=positive_int, default=5, help="measured optimiser steps per way"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/gpu_check"))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        os.environ.update(ENVIRONMENT_ON_CPU | os.environ)
    model = options.model or (random_model(options.work) if num_gpus else str(TINY_POLICY))
    planned = ways(num_gpus, has_vllm=importlib.util.find_spec("vllm") is not None)
    figures: dict[str, Any] = {way: why for way, why in planned.items() if isinstance(why, str)}
    failed = []
    with Grid(options.work) as grid:
        for way, choice in tqdm(planned.items(), unit="way", disable=None):
            if way in figures:
                continue
            try:
                figures[way] = measure(grid, way, choice, model, options.steps)
            except CommandFailedError as error:
                failed.append(way)
                tqdm.write(str(error), file=sys.stderr)
    device = torch.cuda.get_device_name() if num_gpus else f"{os.cpu_count()} CPU cores"
    entry = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": options.model or (MODEL if num_gpus else "embedded policy"),
        "versions": versions(),
        "ways": {way: figures.get(way, "failed") for way in planned},
    }
    name = f"{num_gpus} x {device}" if num_gpus > 1 else device
    write_json(options.output, read_json(options.output, {}) | {name: entry})
    sys.stdout.write(f"# {name}\n\n{table(entry)}\n\nWritten to {options.output}.\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def random_model(work: Path) -> str:
    """Save a model of 0.5 billion random weights, unless it is there; return its folder."""
    folder = work / "model"
    if not (folder / "config.json").exists():
        load_model(MODEL, "cuda").save_pretrained(folder)
        load_tokenizer().save_pretrained(folder)
    return str(folder)


def table(entry: Mapping[str, Any]) -> str:
    """Return the figures of a device as a Markdown table."""
    rows = []
    for way, found in entry["ways"].items():
        cells = [found] if isinstance(found, str) else [
            *(f"{found[f'{kind}_tokens_per_second']:,.0f}" for kind in ("sampled", "trained")),
            f"{found['utilisation']:.1%}",
            " / ".join(f"{found[f'{name}_seconds']:.2f}" for name in PHASES),
            f"{found['peak_gib']:.2f}", f"{found['drift']:.1e}",
        ]  # fmt: skip
        rows.append([way, *cells, *[""] * (len(COLUMNS) - 1 - len(cells))])
    return markdown_table(COLUMNS, rows)


if __name__ == "__main__":
    main()
