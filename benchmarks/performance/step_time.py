"""A whole optimiser step of our trainer compared with TRL's, through the TRL adapter.

Both run the same environment with the same batch size from the same weights: before each pair TRL's
trainer gets a copy of ours, since the length of episodes depends on the policy.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_instruct_2507_chat_template

from agent_trainers.cli import sft
from agent_trainers.cli.train_options import parse_arguments
from agent_trainers.policies.models import cache_folder
from agent_trainers.small_models import prepare
from agent_trainers.trainers.grpo import StepGRPOTrainer
from benchmarks.performance.interleaved import compare, spread, train_interleaved
from benchmarks.performance.models import (
    EMBEDDED,
    ENVIRONMENT,
    Settings,
    load_model,
    load_tokenizer,
)
from benchmarks.trl_peer import batch_of, make_trl_trainer

TARGET: Final = 0.8
LANGUAGE_MODEL_TARGET: Final = 0.6
PAIRS_PER_ROUND: Final = 4
"""Steps are short and differ in their episodes, so the median needs many."""


def measure_step_time(settings: Settings) -> dict[str, Any]:
    """Return the seconds of our step over those of TRL's."""
    is_scripted = settings.step_model != EMBEDDED
    load = partial(load_model, settings.step_model, settings.device, is_scripted=is_scripted)
    options = {
        "num_generations": settings.num_generations,
        "per_device_train_batch_size": settings.num_questions * settings.num_generations,
        **({"max_logprob_drift": None} if is_scripted else {}),
    }
    rounds = PAIRS_PER_ROUND * settings.rounds
    result = _compare(settings, load, load_tokenizer(), options, rounds, TARGET)
    batch = f"{settings.num_questions} x {settings.num_generations}"
    return result | {"model": settings.step_model, "batch": batch}


def measure_language_model(settings: Settings) -> dict[str, Any]:
    """Return the same of SmolLM2 after a warm start, so that it calls tools."""
    folder = settings.language_model or str(warm_model(cache_folder() / "models" / "smollm2-calls"))
    load = partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    options = {
        "config": "smollm2",
        "max_completion_length": 64,
        "per_device_train_batch_size": 8,  # TRL computes the logits of a whole batch at once
    }
    target = LANGUAGE_MODEL_TARGET
    result = _compare(settings, load, tokenizer, options, settings.rounds, target)
    return result | {"model": folder, "batch": "8"}


def warm_model(folder: Path) -> Path:
    """Return the folder of a SmolLM2 that calls tools as TRL reads them; make it if necessary."""
    if folder.exists():
        return folder
    base = prepare("smollm2")
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        templated, output = Path(temporary) / "base", Path(temporary) / "warm"
        AutoModelForCausalLM.from_pretrained(base).save_pretrained(templated)
        tokenizer = AutoTokenizer.from_pretrained(base)
        tokenizer.chat_template = qwen3_instruct_2507_chat_template
        tokenizer.save_pretrained(templated)
        sft.run(["--model", str(templated), "--env", ENVIRONMENT, "--output_dir", str(output)])
        output.rename(folder)
    return folder


def _compare(
    settings: Settings, load: Callable[[], Any], tokenizer: Any, options: dict[str, Any],
    rounds: int, target: float,
) -> dict[str, Any]:  # fmt: skip
    drift = {name: options.pop(name) for name in ("max_logprob_drift",) if name in options}
    trainer_options = settings.trainer_options
    if "config" in options:
        del trainer_options["bf16"]  # as the recipe has it
    with tempfile.TemporaryDirectory() as folder:
        options |= trainer_options | {
            "max_steps": rounds + 1, "output_dir": folder, "save_strategy": "no",
            "num_eval_tasks": 0,
        }  # fmt: skip
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        _, config = parse_arguments(arguments)
        for name, value in drift.items():
            setattr(config, name, value)
        ours = StepGRPOTrainer(
            model=load(), env=ENVIRONMENT, args=config, processing_class=tokenizer
        )
        theirs, last_batch = make_trl_trainer(ENVIRONMENT, {}, config, tokenizer, model=load())
        steps = train_interleaved(
            {"ours": ours, "trl": theirs},
            rounds,
            before_round=lambda: theirs.model.load_state_dict(ours.model.state_dict()),
            facts={
                "ours": partial(_facts_of_ours, ours),
                "trl": partial(_facts_of_theirs, theirs, last_batch),
            },
        )
    seconds = {name: [step.seconds for step in timed] for name, timed in steps.items()}
    return compare(seconds["ours"], seconds["trl"], target=target) | {
        "per_step": {
            name: {fact: spread([step.facts[fact] for step in timed]) for fact in timed[0].facts}
            for name, timed in steps.items()
        }
    }


def _facts_of_ours(trainer: StepGRPOTrainer) -> dict[str, float]:
    num_steps, success = batch_of(trainer)
    sampled = sum(sum(trajectory.lengths) for trajectory in trainer.trajectories["train"])
    return {"environment_steps": num_steps, "sampled_tokens": sampled, "success": success}


def _facts_of_theirs(trainer: Any, last_batch: Callable[[], tuple[int, float]]) -> dict[str, float]:
    (mean_length,) = trainer._metrics["train"]["completions/mean_length"]  # since the last log
    num_steps, success = last_batch()
    sampled = round(mean_length * len(trainer.environments))
    return {"environment_steps": num_steps, "sampled_tokens": sampled, "success": success}
