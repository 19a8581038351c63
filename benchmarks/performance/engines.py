"""Optimiser steps on vLLM and on transformers: ``python -m benchmarks.performance.engines``.

Our trainer, TRL's with ``environment_factory``, and TRL's asynchronous trainer train a model in the
same environment, from the same weights, interleaved. Each measurement is a run with vLLM's server
of its own, without its first steps, in which queues fill. TRL's asynchronous trainer fills its
steps by tokens, so the times of all are per episode, shown for a step of ``--episodes``.

TRL's asynchronous trainer assumes CUDA. On a CPU it attends with PyTorch instead of FlashAttention
3 and sends its weights by gloo instead of NCCL; all else is TRL's.
"""

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tqdm.auto import tqdm
from transformers import PrinterCallback, TrainerCallback

from agent_envs.adapters.trl import environment_factory, environment_return, tasks_dataset
from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.small_models import prepare
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.gpu_check import ENVIRONMENT_ON_CPU, free_port, serve
from benchmarks.performance.interleaved import measure_interleaved, spread
from benchmarks.performance.models import (
    DEVICE_DEFAULTS,
    EMBEDDED,
    ENVIRONMENT,
    SEED,
    make_config,
    quieten,
)
from benchmarks.trl_peer import MAX_COMPLETION_TOKENS, make_trl_trainer

AGAINST: Final = "trl"
EPISODE_TOKENS: Final = 600
"""TRL's limit of an episode; one of ours ends by its turns."""


class Clock(TrainerCallback):  # type: ignore[misc] # transformers is untyped
    """Records when optimiser steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())


def settings_of(options: argparse.Namespace, url: str | None) -> Any:
    """Return the settings of all sides; with the address of a server, vLLM generates."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = DEVICE_DEFAULTS[device].trainer_options | {
        "output_dir": str(options.work / "run"), "seed": SEED, "logging_steps": 1,
        "max_steps": options.warm_up + options.steps,
        "per_device_train_batch_size": options.episodes, "steps_per_generation": 1,
        "num_generations": 8, "max_completion_length": 48, "num_eval_tasks": 0,
        "save_strategy": "no", "max_logprob_drift": 1, "lr_scheduler_type": "constant",
        "warmup_steps": 0,
    }  # fmt: skip
    if url:
        settings |= {
            "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url,
            "vllm_group_port": free_port(),
        }  # fmt: skip
    return make_config(settings)


def make_ours(model: str, options: argparse.Namespace, url: str | None) -> Any:
    """Make our trainer."""
    config = settings_of(options, url)
    return StepGRPOTrainer(model, ENVIRONMENT, config, processing_class=load_tokenizer(model))


def make_trl(model: str, options: argparse.Namespace, url: str | None) -> Any:
    """Make TRL's trainer."""
    if url and not torch.cuda.is_available():
        from agent_trainers.trainers.cpu_engine import use_cpu_engine

        use_cpu_engine()
    config, tokenizer = settings_of(options, url), load_tokenizer(model)
    trainer, _ = make_trl_trainer(ENVIRONMENT, {}, config, tokenizer, model=model)
    trainer.max_completion_length = EPISODE_TOKENS
    return trainer


def make_trl_async(model: str, options: argparse.Namespace, url: str) -> Any:
    """Make TRL's asynchronous trainer."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )

    config, transfer = settings_of(options, url), None
    shared = (
        "output_dir", "seed", "max_steps", "per_device_train_batch_size", "num_generations",
        "learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "use_cpu", "bf16",
        "save_strategy", "report_to", "disable_tqdm", "dataloader_pin_memory",
        "gradient_checkpointing",
    )  # fmt: skip
    if not torch.cuda.is_available():
        packing._flash_attn = lambda: PlainAttention
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1.0  # of utilisation only
        transfer = GlooTransfer(url)
    return AsyncGRPOTrainer(
        model=model,
        reward_funcs=replayed_return,
        args=AsyncGRPOConfig(
            vllm_server_base_url=url,
            max_completion_length=MAX_COMPLETION_TOKENS,
            max_tool_calling_iterations=3,  # four turns, as the others have
            **{name: getattr(config, name) for name in shared},
        ),
        train_dataset=tasks_dataset(ENVIRONMENT, config.num_train_groups, config.seed),
        processing_class=load_tokenizer(model),
        environment_factory=make_environment,
        weight_transfer=transfer,
    )


def make_environment() -> Any:
    """Make an environment for TRL in any process."""
    return environment_factory(ENVIRONMENT)()


def replayed_return(
    completions: Sequence[Any], task: Sequence[int], seed: Sequence[int], **_: Any
) -> list[float | None]:
    """Return the sum of rewards of each episode: this trainer gives rewards no environments."""
    environments = []
    for completion, its_task, its_seed in zip(completions, task, seed, strict=True):
        environment = make_environment()
        environment.reset(task=its_task, seed=its_seed)
        for message in completion:
            for call in environment._valid_calls(message):
                environment._call(call["name"], call["arguments"])
        environments.append(environment)
    return environment_return(completions, environments)


class PlainAttention:
    """PyTorch's attention with the signature of FlashAttention."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
        key_starts: torch.Tensor, *_: Any, softmax_scale: float, **__: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend in each segment to the keys of its path; (T, heads, dim) each."""
        results = []
        segments = zip(starts.tolist(), starts[1:].tolist(), strict=False)
        paths = zip(key_starts.tolist(), key_starts[1:].tolist(), strict=False)
        for (a, b), (c, d) in zip(segments, paths, strict=True):
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            results.append(out[0].transpose(0, 1))
        return torch.cat(results)


class GlooTransfer:
    """Sends weights to vLLM's server by gloo; a ``WeightTransferProtocol`` of TRL."""

    def __init__(self, url: str) -> None:
        """Send to the server at `url`."""
        from trl.experimental.async_grpo.vllm_client import VLLMClient

        from agent_trainers.trainers.cpu_engine import CpuClient

        self._client = CpuClient(base_url=url, group_port=free_port())
        server = VLLMClient(url)
        self.pause, self.resume = server.pause, server.resume

    def init_weight_transfer(self) -> None:
        """Connect to the server."""
        self._client.init_communicator()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send all weights."""
        weights = list(iterator)
        metadata = [
            (name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in weights
        ]
        self._client.update_named_params(metadata, iter(weights))

    def destroy(self) -> None:
        """Keep the connection: the server ends with the run."""


SIDES: Final[Mapping[str, tuple[Callable[..., Any], bool]]] = {
    "ours": (make_ours, False),
    "trl": (make_trl, False),
    "ours, vLLM": (make_ours, True),
    "trl, vLLM": (make_trl, True),
    "trl asynchronous, vLLM": (make_trl_async, True),
}
"""Trainer of each side, and whether vLLM generates."""


def measure(side: str, model: str, options: argparse.Namespace) -> float:
    """Return the seconds of ``options.episodes`` episodes."""
    make, on_vllm = SIDES[side]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serve(model, options.work)) if on_vllm else None
        trainer = make(model, options, url)
        clock = Clock()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(clock)
        trainer.train()
    rows = [row for row in trainer.state.log_history if "grad_norm" in row][options.warm_up :]
    episodes = sum(row.get("batch/samples_per_step", options.episodes) for row in rows)
    seconds = clock.ends[-1] - clock.ends[options.warm_up - 1]
    del trainer
    gc.collect()
    return seconds / episodes * options.episodes


def prepare_model(name: str, work: Path) -> str:
    """Return a folder with a model that acts, and whose tool calls TRL can read.

    A small model gets the chat template of the embedded policy and 64 demonstrations, once.
    """
    if name == EMBEDDED:
        return str(TINY_POLICY)
    source, folder = work / name, work / f"{name}_warm"
    if not (folder / "config.json").exists():
        shutil.copytree(prepare(name), source, dirs_exist_ok=True)
        shutil.copy(TINY_POLICY / "chat_template.jinja", source)
        path, key = source / "tokenizer_config.json", "response_template"
        ours = json.loads((TINY_POLICY / path.name).read_text(encoding="utf-8"))
        theirs = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, theirs | {key: ours[key]})
        command = [sys.executable, "-m", "agent_trainers.cli.sft", "--model", str(source)]
        command += ["--env", ENVIRONMENT, "--num_tasks", "64", "--output_dir", str(folder)]
        subprocess.run([*command, "--overwrite"], check=True)  # noqa: S603 - our own module
    return str(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", default=EMBEDDED,
        help=f"{EMBEDDED}, or a small model, such as smollm2, which is shown demonstrations first",
    )  # fmt: skip
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), metavar="SIDE",
                        help=f"of {', '.join(map(repr, SIDES))}")  # fmt: skip
    parser.add_argument("--rounds", type=positive_int, default=3, help="measurements of each side")
    parser.add_argument("--steps", type=positive_int, default=5, help="optimiser steps of each")
    parser.add_argument(
        "--warm_up", type=positive_int, default=5, help="optimiser steps before them"
    )
    parser.add_argument("--episodes", type=positive_int, default=32, help="episodes of a step")
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    options = parser.parse_args(arguments)
    if any(SIDES[side][1] for side in options.sides) and importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed. `make test-vllm` does it; or choose --sides ours trl.")
    if not torch.cuda.is_available():
        os.environ.update(ENVIRONMENT_ON_CPU | os.environ)
    quieten()
    model = prepare_model(options.model, options.work)
    sides = {side: functools.partial(measure, side, model, options) for side in options.sides}
    seconds = measure_interleaved(sides, options.rounds, description="rounds")
    results: dict[str, Any] = {side: spread(values) for side, values in seconds.items()}
    for side, values in seconds.items():
        line = f"{side:24} {statistics.median(values):8.2f} s"
        if AGAINST in seconds:
            base = seconds[AGAINST]
            ratio = spread([a / b for a, b in zip(values, base, strict=True)])
            results[side]["ratio"] = ratio
            line += f"   {ratio['median']:6.3f}   ({ratio['min']:.3f} to {ratio['max']:.3f})"
        tqdm.write(line, file=sys.stdout)
    if options.output:
        write_json(options.output, {"model": options.model, "episodes": options.episodes} | results)


if __name__ == "__main__":
    main()
