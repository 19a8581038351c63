"""Count the work of an optimiser step: ``python -m benchmarks.performance.counts``.

PyTorch counts the floating-point operations of forward and backward passes, and a hook of DDP the
bytes of gradients that a process puts into an all-reduce, in the last of two optimiser steps of the
embedded policy with the same 32 episodes divided among 1, 2, 4 and 8 processes. The formula gives
each weight two operations per token in the forward and four in the backward pass, and attention
the same for each pair of positions; an all-reduce has the bytes of all weights, once per step.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.launch import leave_process_group
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.gpu_check import free_port
from benchmarks.performance.models import ENVIRONMENT, SEED, quieten

RESULTS: Final = Path(__file__).parents[1] / "results" / "counts.json"
EPISODES: Final = 32


class _Counts(TrainerCallback):  # type: ignore[misc]
    """Counts of the last optimiser step."""

    def __init__(self, trainer: StepGRPOTrainer) -> None:
        self._trainer = trainer
        trainer.add_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the bytes of gradients, if there are other processes."""
        if self._trainer.accelerator.num_processes > 1:
            self._trainer.model_wrapped.register_comm_hook(None, self._reduce)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from zero."""
        self.flops = self.expected_flops = self.reduced_bytes = 0

    def _reduce(self, _: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        self.reduced_bytes += bucket.buffer().nbytes
        return allreduce_hook(None, bucket)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count the operations of all micro-batches."""
        step = Trainer.training_step

        def counted(trainer: Any, model: Any, inputs: Any, *others: Any) -> Any:
            unwrapped = trainer.accelerator.unwrap_model(model)
            hook = unwrapped.register_forward_pre_hook(self._expect, with_kwargs=True)
            with FlopCounterMode(display=False) as counter:
                loss = step(trainer, model, inputs, *others)
            hook.remove()
            self.flops += counter.get_total_flops()
            return loss

        with patch.object(Trainer, "training_step", counted):
            yield

    def _expect(self, model: Any, _: Any, arguments: dict[str, Any]) -> None:
        num_scored = int((arguments["labels"][:, 1:] >= 0).sum())
        self.expected_flops += flops(model.config, *arguments["input_ids"].shape, num_scored)


def flops(config: Any, rows: int, width: int, num_scored: int) -> int:
    """Return the operations of forward and backward passes of rows, by the formula.

    TRL's head is applied to the tokens that are scored, and again in the backward pass.
    """
    heads, layers = config.num_attention_heads * config.head_dim, config.num_hidden_layers
    shared = config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = layers * hidden * (2 * heads + 2 * shared + 3 * inner)
    head, attention = hidden * config.vocab_size, layers * heads * rows * width**2
    return int(6 * rows * width * weights + 8 * num_scored * head + 12 * attention)


def count(index: int, num_processes: int, port: int, folder: str) -> None:
    """Train in process `index`, and write its counts."""
    os.environ |= {
        "RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    args = StepGRPOConfig(
        output_dir=f"{folder}/run", max_steps=2, seed=SEED, num_generations=4, use_cpu=True,
        per_device_train_batch_size=EPISODES // num_processes, max_completion_length=24,
        save_strategy="no", report_to="none", disable_tqdm=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    # PyTorch does not count its fused attention on CPUs
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, attn_implementation="eager")
    trainer = StepGRPOTrainer(model, ENVIRONMENT, args)
    trainer.scorer._can_share = False  # one forward pass per micro-batch, as in the formula
    counts = _Counts(trainer)
    with counts.counting():
        trainer.train()
    found = {name: getattr(counts, name) for name in ("flops", "expected_flops", "reduced_bytes")}
    expected_bytes = sum(p.nbytes for p in model.parameters()) if num_processes > 1 else 0
    Path(folder, f"{index}.json").write_text(
        json.dumps(found | {"expected_bytes": expected_bytes}), encoding="utf-8"
    )
    del trainer, counts
    if num_processes > 1:
        leave_process_group()


def count_in(num_processes: int) -> dict[str, Any]:
    """Return the counts of a step in so many processes: operations of all, bytes of each."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            count, (num_processes, free_port(), folder), num_processes, start_method="fork"
        )
        own = [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(num_processes)]
    total = functools.reduce(lambda a, b: {k: a[k] + b[k] for k in a}, own)
    return {
        "processes": num_processes,
        "flops": total["flops"], "flops_ratio": total["flops"] / total["expected_flops"],
        "reduced_bytes": total["reduced_bytes"] // num_processes,
        "expected_bytes": total["expected_bytes"] // num_processes,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=positive_int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    options = parser.parse_args(arguments)
    quieten()
    rows = [count_in(number) for number in options.processes]
    for row in rows:
        sys.stdout.write(
            f"{row['processes']} processes: {row['flops']:.4g} FLOPs, {row['flops_ratio']:.4f} of "
            f"the formula's; {row['reduced_bytes']:,} bytes in an all-reduce, "
            f"{row['expected_bytes']:,} by the formula\n"
        )
    write_json(options.output, {"episodes": EPISODES, "rows": rows})


if __name__ == "__main__":
    main()
