"""A whole optimiser step of ours against one of TRL's own trainer, through the TRL adapter.

Both play the same environment with the same batch, from the same weights: before each pair, TRL's
trainer gets those of ours, since how long episodes are follows from the policy.
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any, Final

from agent_trainers.cli.train_options import parse_arguments
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from benchmarks.performance.alternation import TimedStep, train_in_turns
from benchmarks.performance.comparison import compare, spread
from benchmarks.performance.models import EMBEDDED, load_model, load_tokenizer
from benchmarks.performance.settings import Settings
from benchmarks.trl_peer import make_trl_trainer, played_by_ours

ENVIRONMENT: Final = "AgentR1/SyntheticMultiHop-v0"
TARGET: Final = 0.8
PAIRS_PER_ROUND: Final = 4
"""Steps are short, and differ in what is played in them: the median wants many."""


def measure_step_time(settings: Settings) -> dict[str, Any]:
    """Return seconds of our step over seconds of TRL's, pair by pair, and what was done in them."""
    with tempfile.TemporaryDirectory() as folder:
        config = _config(settings, folder)
        tokenizer = load_tokenizer()
        is_scripted = settings.step_model != EMBEDDED
        if is_scripted:
            config.max_logprob_drift = None
        load = functools.partial(
            load_model, settings.step_model, settings.device, is_scripted=is_scripted
        )
        ours = StepGRPOTrainer(
            model=load(), env=ENVIRONMENT, args=config, processing_class=tokenizer
        )
        theirs, played = make_trl_trainer(ENVIRONMENT, {}, config, tokenizer, model=load())
        steps = train_in_turns(
            {"ours": ours, "trl": theirs},
            PAIRS_PER_ROUND * settings.rounds,
            before_round=lambda: theirs.model.load_state_dict(ours.model.state_dict()),
            facts={
                "ours": functools.partial(facts_of_ours, ours),
                "trl": functools.partial(facts_of_theirs, theirs, played),
            },
        )
    result = compare(
        [step.seconds for step in steps["ours"]],
        [step.seconds for step in steps["trl"]],
        target=TARGET,
    )
    return result | {
        "model": settings.step_model,
        "batch": f"{settings.num_questions} x {settings.num_generations}",
        "per_step": {name: summary(timed) for name, timed in steps.items()},
    }


def _config(settings: Settings, folder: str) -> StepGRPOConfig:
    """Return the settings of the default run."""
    options = {
        **settings.trainer_options,
        "max_steps": PAIRS_PER_ROUND * settings.rounds + 1,
        "num_generations": settings.num_generations,
        "per_device_train_batch_size": settings.num_questions * settings.num_generations,
        "output_dir": folder,
        "save_strategy": "no",
        "num_eval_tasks": 0,
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    _, config = parse_arguments(arguments)
    return config


def facts_of_ours(trainer: StepGRPOTrainer) -> dict[str, float]:
    """Return what our last batch did."""
    num_steps, success = played_by_ours(trainer)
    sampled = sum(sum(trajectory.lengths) for trajectory in trainer.trajectories["train"])
    return {"environment_steps": num_steps, "sampled_tokens": sampled, "success": success}


def facts_of_theirs(trainer: Any, played: Callable[[], tuple[int, float]]) -> dict[str, float]:
    """Return what TRL's last batch did."""
    # since the last log; each step is logged
    (mean_length,) = trainer._metrics["train"]["completions/mean_length"]
    num_steps, success = played()
    sampled = round(mean_length * len(trainer.environments))
    return {"environment_steps": num_steps, "sampled_tokens": sampled, "success": success}


def summary(steps: list[TimedStep]) -> dict[str, Any]:
    """Return the spread of each fact of the steps."""
    names = steps[0].facts
    return {name: spread([step.facts[name] for step in steps]) for name in names}
