"""A whole optimiser step of our trainer compared with TRL's, through the TRL adapter.

Both run the same environment with the same batch size from the same weights: before each pair TRL's
trainer gets a copy of ours, since the length of episodes depends on the policy.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from agent_trainers.cli.train_options import parse_arguments
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

PAIRS_PER_ROUND: Final = 4
"""Steps are short and differ in their episodes, so the median needs many."""


def measure_step_time(settings: Settings) -> dict[str, Any]:
    """Return the seconds of our step over those of TRL's."""
    is_scripted = settings.step_model != EMBEDDED
    load = partial(load_model, settings.step_model, settings.device, is_scripted=is_scripted)
    rounds = PAIRS_PER_ROUND * settings.rounds
    tokenizer = load_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        options = settings.trainer_options | {
            "num_generations": settings.num_generations,
            "per_device_train_batch_size": settings.num_questions * settings.num_generations,
            "max_steps": rounds + 1, "output_dir": folder, "save_strategy": "no",
            "num_eval_tasks": 0,
        }  # fmt: skip
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        _, config = parse_arguments(arguments)
        if is_scripted:
            config.max_logprob_drift = None
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
    return compare(seconds["ours"], seconds["trl"]) | {
        "model": settings.step_model,
        "batch": f"{settings.num_questions} x {settings.num_generations}",
        "per_step": {
            name: {fact: spread([step.facts[fact] for step in timed]) for fact in timed[0].facts}
            for name, timed in steps.items()
        },
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
