"""Measure cases in this process, or as one of several that torchrun started.

``python -m benchmarks.scaling.measure CASES.json RESULTS.json`` times a few optimiser steps of each
case by kind of work.
"""

import dataclasses
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.launch import leave_process_group
from agent_trainers.policies.generation import Generation
from agent_trainers.policies.sampling import Completion
from agent_trainers.policies.slots import Finish, Prompt
from agent_trainers.policies.streams import GenerationStream
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from benchmarks.performance.models import load_tokenizer, quieten
from benchmarks.scaling.cases import NUM_GROUPS, Case, FixedShape

TERMS: Final = ("generate", "environment", "score", "train", "communication")
NUM_STEPS: Final = 3
_NO_TOKEN: Final = 10**6


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Seconds of every optimiser step, by what was done."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.steps: list[dict[str, float]] = []
        self._running: dict[str, float] = defaultdict(float)
        self._started = self._started_cpu = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose seconds count under `name`."""

        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = function(*arguments, **options)
            self._running[name] += time.perf_counter() - started
            return result

        return call

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step."""
        self._running.clear()
        self._started, self._started_cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the step."""
        total = time.perf_counter() - self._started
        seconds = self._running
        self.steps.append(
            {
                "generate": seconds["generate"],
                "environment": max(0.0, seconds["play"] - seconds["generate"]),
                "score": seconds["batch"] - seconds["play"],
                "train": total - seconds["batch"],
                "total": total,
                "cpu": time.process_time() - self._started_cpu,
            }
        )


class FixedLengthTrainer(StepGRPOTrainer):
    """Samples turns of one length, and times what it does."""

    def __init__(self, *, stopwatch: Stopwatch, **options: Any) -> None:
        """Set up the trainer; nothing but the last token of a turn ends it."""
        super().__init__(callbacks=[stopwatch], **options)
        self._stopwatch = stopwatch
        self._end_of_turn: int = self._tokenizer.eos_token_id
        self.sampler.settings = dataclasses.replace(
            self.sampler.settings, eos_token_ids=(_NO_TOKEN,)
        )
        batch = stopwatch.timed("batch", self._generate_and_score_completions)
        self._generate_and_score_completions = batch  # type: ignore[method-assign]
        rollout: Any = self.player.rollouts["train"]
        rollout.collect = stopwatch.timed("play", rollout.collect)
        policy = rollout._policy
        self._open_slots = policy._make_stream
        policy._make_stream = self._open_timed_slots

    def _open_timed_slots(self, prompt: Prompt, finish: Finish) -> GenerationStream:
        def end_turn(ids: list[int], completion: Completion | None) -> Generation:
            if completion is None:
                raise RuntimeError("a state did not fit the model.")
            sampled = [*completion.token_ids[:-1], self._end_of_turn]
            return finish(ids, dataclasses.replace(completion, token_ids=sampled))

        stream: GenerationStream = self._open_slots(prompt, end_turn)
        timed = self._stopwatch.timed("generate", stream.advance)
        stream.advance = timed  # type: ignore[method-assign]
        return stream


def measure(case: Case, folder: str, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Time `num_steps` optimiser steps of a case, after one that does not count.

    Returns:
        The case, and the median, least and most seconds of each term, in total, and of the
        processor's work for this process (far less than the total: the machine was busy with other
        things). Communication is an all-reduce of as many bytes as the gradient has, timed by
        itself and taken off what training took.
    """
    stopwatch = Stopwatch()
    episodes = NUM_GROUPS * case.group_size
    trainer = FixedLengthTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY_POLICY, max_position_embeddings=8192),
        env=functools.partial(FixedShape, case),
        args=StepGRPOConfig(
            folder, max_steps=1 + num_steps, num_generations=case.group_size,
            per_device_train_batch_size=episodes // case.processes,
            max_completion_length=case.action_tokens, learning_rate=1e-4, use_cpu=True, bf16=False,
            advantage_estimator="grpo_step", transformers_generation="slots",
            max_logprob_drift=1e6,  # the last token of a turn is not the one that was sampled
            gradient_checkpointing=False,
            ddp_find_unused_parameters=False, dataloader_pin_memory=False,
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        processing_class=load_tokenizer(),
        stopwatch=stopwatch,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    lengths = {len(t.transitions) for t in trainer.trajectories["train"]}
    if lengths != {case.turns}:
        raise RuntimeError(f"episodes of {lengths} turns were played instead of {case.turns}.")
    communication = _all_reduce_seconds(trainer.model)
    steps = stopwatch.steps[1:]
    for step in steps:
        step["communication"] = min(communication, step["train"])
        step["train"] -= step["communication"]
    return {"case": dataclasses.asdict(case), "seconds": _summary(steps), "num_steps": len(steps)}


def measure_all(cases: list[Case], num_steps: int) -> list[dict[str, Any]]:
    """Measure cases one after the other; they must all have as many processes as there are."""
    is_main = int(os.environ.get("RANK", "0")) == 0
    progress = tqdm(cases, desc="measuring", unit="case", disable=not is_main)
    with tempfile.TemporaryDirectory() as folder:
        return [measure(case, folder, num_steps) for case in progress]


def _summary(steps: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    shorten: dict[str, Callable[[list[float]], float]] = {
        "median": statistics.median,
        "least": min,
        "most": max,
    }
    return {
        term: {name: round(f([step[term] for step in steps]), 6) for name, f in shorten.items()}
        for term in (*TERMS, "total", "cpu")
    }


def _all_reduce_seconds(model: torch.nn.Module, repeats: int = 7) -> float:
    if not torch.distributed.is_initialized():
        return 0.0
    size = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gradient, seconds = torch.zeros(size), []
    for _ in range(repeats):
        torch.distributed.barrier()
        started = time.perf_counter()
        torch.distributed.all_reduce(gradient)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    quieten()
    torch.set_num_threads(1)
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    measured = measure_all([Case(**case) for case in request["cases"]], request["num_steps"])
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        write_json(sys.argv[2], measured)
    leave_process_group()
