"""``agent-r1-train``: train a language model in an environment.

Without arguments it trains the embedded policy on the synthetic environment, on CPU.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from accelerate.utils import gather_object
from datasets import Dataset
from transformers.hf_argparser import HfArg
from transformers.utils.logging import disable_progress_bar

from agent_envs.core.lookup import lookup
from agent_envs.data.files import write_json
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    Interrupted,
    StopAtStepEnd,
    StopRequests,
)
from agent_trainers.cli import dry_run, output_folder
from agent_trainers.cli.arguments import CommandParser, json_object, read_config
from agent_trainers.cli.environments import Split, environment_maker, first_tasks, hold_out
from agent_trainers.cli.launch import (
    launch_command,
    leave_process_group,
    supervise,
    unknown_to_accelerate,
)
from agent_trainers.cli.loggers import check_loggers, close_loggers, open_loggers
from agent_trainers.cli.models import ModelArguments, fit_environment, write_merged
from agent_trainers.cli.output_folder import EVALUATION_FILE
from agent_trainers.cli.results import EMBEDDED, SampleCollector, describe_run, write_results
from agent_trainers.monitoring.live_view import show_progress
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.recipes import (
    ACCELERATE_CONFIGS,
    FOLDER,
    MODEL_RECIPE,
    RECIPES,
    find_settings,
)
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.presets import PRESETS, config_class, has_critic, trainer_class

PROGRAM: Final = "agent-r1-train"
HELP_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "environment": ("env", "env_kwargs", "eval_env_kwargs", "num_eval_tasks"),
    "model": (
        "model", "dtype", "max_prompt_length", "max_completion_length", "bf16", "use_cpu", "lora_r",
        "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "merge_adapter",
    ),
    "algorithm": (
        "algorithm", "advantage_estimator", "gamma", "lam", "token_gamma", "token_lam",
        "step_advantage_weight", "loss_type", "loss_denominator", "loss_mask", "advantage_mask",
        "importance_sampling_level", "epsilon", "epsilon_high", "beta", "kl_placement",
        "use_bias_correction_kl",
        "reward_schedules",
    ),
    "critic": (
        "critic_model", "critic_learning_rate", "critic_warmup_steps", "value_coef",
        "value_clip_range", "bootstrap_truncated",
    ),
    "rollout": (
        "num_generations", "temperature", "step_timeout", "episode_timeout", "group_quorum",
        "max_fault_share",
        "transformers_generation", "use_vllm", "vllm_mode", "vllm_importance_sampling_mode",
        "max_logprob_drift",
    ),
    "optimisation": (
        "max_steps", "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps",
        "max_tokens_per_micro_batch", "merge_steps", "seed",
    ),
    "processes": ("num_processes", "accelerate_config"),
    "the run": (
        "output_dir", "save_steps", "resume", "overwrite", "dry_run", "sample_steps", "report_to",
        "push_to_hub",
    ),
}  # fmt: skip
"""What ``--help`` shows: our own options, and those of TRL's that most runs set."""


@dataclass
class TrainArguments(ModelArguments):
    """What to train, where, and how it is measured."""

    env: str = HfArg(default="AgentR1/SyntheticMultiHop-v0", help="Gymnasium id to train in.")
    env_kwargs: str | None = HfArg(
        default=None, help='Keyword arguments of the environment as JSON: \'{"data": "x.jsonl"}\'.'
    )
    eval_env_kwargs: str | None = HfArg(
        default=None, help="Those that differ where it is evaluated, as JSON."
    )
    algorithm: str = HfArg(default="grpo_step", help=f"One of {', '.join(PRESETS)}.")
    num_eval_tasks: int = HfArg(
        default=200,
        help="Tasks played once before and once after training; 0 for none. Without "
        "eval_env_kwargs they are held out of training, at most a fifth of all.",
    )
    sample_steps: int = HfArg(
        default=10,
        help="Optimiser steps between two samples of trajectories, in trajectories/ and on "
        "trajectories.html; 0 for those of the first and the last step only.",
    )
    dry_run: bool = HfArg(
        default=False,
        help="Play, score and backpropagate one batch, show all of it, and stop before anything is "
        "updated or saved.",
    )
    num_processes: int | None = HfArg(
        default=None,
        help="Processes that share each batch, one on each accelerator or on the CPU; further "
        "options of 'accelerate launch' are handed on to it.",
    )
    accelerate_config: str | None = HfArg(
        default=None,
        help=f"A file of Accelerate's settings, or one of {', '.join(ACCELERATE_CONFIGS)}.",
    )
    resume: bool = HfArg(
        default=False,
        help="Go on from the newest checkpoint in output_dir that is whole; begin anew if the run "
        "there was stopped before its first.",
    )
    overwrite: bool = HfArg(
        default=False, help="Delete the run that output_dir holds, and begin anew."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # transformers 5.23 deprecates names that TRL 1.16 uses; nothing a user could act on
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)
    try:
        given, others = make_parser(arguments).check(arguments, unknown_to_accelerate)
        command = launch_command(
            given.num_processes,
            given.accelerate_config,
            others,
            "agent_trainers.cli.train",
            arguments,
        )
        if command is not None:
            sys.exit(supervise(command, say))
        with StopRequests(say) as requests:
            exit_code = run(arguments, requests)
        leave_process_group()
    except (AgentEnvsError, gym.error.Error) as error:
        sys.exit(f"{PROGRAM}: {error}")
    except Interrupted as interrupted:
        say("Stopped. The same command with --resume goes on from the last checkpoint.")
        sys.exit(interrupted.exit_code)
    sys.exit(exit_code)


def run(arguments: Sequence[str], requests: StopRequests | None = None) -> int:
    """Train in this process, alone or as one of several; return the exit code.

    `requests` tells whether the run is to stop.
    """
    disable_progress_bar()  # transformers' bars for loading and saving; ours stays
    options, config = parse_arguments(arguments)
    if options.dry_run:
        dry_run.prepare(config)
        trainer, _ = make_trainer(options, config)
        given = trainer.last_checkpoint() if options.resume else config.resume_from_checkpoint
        dry_run.dry_run(trainer, f"{options.algorithm} on {options.env}", given)
        return 0
    folder = Path(config.output_dir)
    is_main = int(os.environ.get("RANK", "0")) == 0  # the others leave the folder to it
    if options.resume and not folder.is_dir():
        raise ConfigurationError(
            f"--resume: there is no folder {folder}, so no run to go on with. Check --output_dir, "
            "or leave --resume out to begin anew."
        )
    with output_folder.hold(folder) if is_main else contextlib.nullcontext():
        if is_main:
            prepare_folder(folder, options, config)
        return train(options, config, shlex.join([PROGRAM, *arguments]), requests)


def prepare_folder(folder: Path, options: TrainArguments, config: StepGRPOConfig) -> None:
    """Make sure that nothing is lost in the output folder, and keep the run's settings there.

    Raises:
        ConfigurationError: If another run would be lost, or goes on with other settings.
    """
    settings = output_folder.settings_of(environment_settings(options), options, config)
    given = config.resume_from_checkpoint
    if options.resume or (given and Path(given).resolve().parent == folder.resolve()):
        for difference in output_folder.check_same_settings(folder, settings):
            say(f"Going on with {difference}.")
    elif options.overwrite:
        output_folder.clear(folder)
    else:
        output_folder.check_unused(folder)
    output_folder.write_settings(folder, settings)


def train(
    options: TrainArguments, config: StepGRPOConfig, command: str, requests: StopRequests | None
) -> int:
    """Train, and leave results in the output folder; return the exit code."""
    started = time.perf_counter()
    check_loggers(config)
    if options.model is not None:
        say_once(_what_applies(options, config))
    trainer, evaluated_on = make_trainer(options, config)
    stop = StopAtStepEnd(requests or StopRequests(say), trainer.accelerator)
    trainer.add_callback(stop)
    progress = show_progress(trainer, f"{options.algorithm} on {options.env}")
    collector = SampleCollector(trainer, options.env, options.sample_steps)
    trainer.add_callback(collector)
    checkpoint = begin_run(trainer, resume=options.resume)
    before = _evaluate_before(trainer, is_resumed=checkpoint is not None)
    run = {
        **environment_settings(options),
        "evaluated_on": evaluated_on,
        "model": options.model or EMBEDDED,
        "algorithm": options.algorithm,
        "command": command,
    }
    describe_run(trainer, run, before, {})
    with contextlib.closing(progress):
        trainer.train(resume_from_checkpoint=checkpoint)
    if stop.stopped_by is not None:
        close_loggers(trainer)
        return stopped_early(trainer, stop.stopped_by)
    after = evaluate(trainer)
    close_loggers(trainer)
    collector.collect_evaluated("evaluation, after training")
    results = describe_run(trainer, run, before, after)
    trainer.create_model_card()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        seconds = round(time.perf_counter() - started, 2)
        write_results(trainer, collector, results | {"total_seconds": seconds})
        if options.merge_adapter:
            say(f"The model with its adapters merged: {write_merged(trainer)}")
    return 0


def _what_applies(options: TrainArguments, config: StepGRPOConfig) -> str:
    """Say by which settings a model is trained that were not given."""
    device = "the CPU" if config.use_cpu else "the accelerator"
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "float32"
    return (
        f"{options.algorithm} on {device} in {precision}: learning rate {config.learning_rate:g}, "
        f"{config.generation_batch_size} episodes a batch in groups of {config.num_generations}, "
        f"{config.max_steps} steps."
    )


def environment_settings(options: TrainArguments) -> dict[str, Any]:
    """Return which environment is trained in, and by which arguments.

    Raises:
        ConfigurationError: If arguments are no JSON object.
    """
    return {
        "env": options.env,
        "env_kwargs": json_object(options.env_kwargs, "--env_kwargs"),
        "eval_env_kwargs": json_object(options.eval_env_kwargs, "--eval_env_kwargs"),
    }


def evaluate(trainer: StepGRPOTrainer) -> dict[str, float]:
    """Play the evaluation tasks; return success, return and number of episodes.

    Empty where there are none.
    """
    if trainer.eval_dataset is None:
        return {}
    trainer.forget_trajectories("eval")
    open_loggers(trainer)
    trainer.evaluate()
    played: dict[str, list[tuple[bool, float]]] = {}
    episodes = [(t.task_id, t.success, t.return_) for t in trainer.trajectories["eval"]]
    for task_id, success, value in gather_object(episodes):
        # Accelerate plays the first tasks again to fill the last batch: they count once.
        if len(samples := played.setdefault(task_id, [])) < trainer.num_generations_eval:
            samples.append((success, value))
    counted = [sample for samples in played.values() for sample in samples]
    return {
        "success": sum(success for success, _ in counted) / len(counted),
        "return": sum(value for _, value in counted) / len(counted),
        "num_episodes": len(counted),
    }


def parse_arguments(arguments: Sequence[str]) -> tuple[TrainArguments, StepGRPOConfig]:
    """Parse the command line and the settings file."""
    options, config = make_parser(arguments).parse(arguments, unknown_to_accelerate)
    return options, config


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command line, with its algorithm's options and its file's defaults.

    Without ``--config`` the file is the recipe ``default``; with ``--model`` the one in the model's
    folder, else ``language_model``. A file's arguments of an environment are for its own
    environment only.

    Raises:
        ConfigurationError: If the file is wrong.
        UnknownNameError: If there is no such recipe or algorithm.
    """
    first = argparse.ArgumentParser(PROGRAM, add_help=False, allow_abbrev=False)
    for name in ("config", "model", "env", "algorithm"):
        first.add_argument(f"--{name}")
    given, _ = first.parse_known_args(list(arguments))
    recipe = "default" if given.model is None else "language_model"
    if given.model is not None and (own := Path(given.model) / MODEL_RECIPE).is_file():
        recipe = str(own)
    path = find_settings(RECIPES, given.config or recipe, kind="--config")
    settings = read_config(path)
    if given.env not in (None, settings.get("env", TrainArguments.env)):
        of_another = ("env_kwargs", "eval_env_kwargs")
        settings = {name: settings[name] for name in settings if name not in of_another}
    algorithm = given.algorithm or settings.get("algorithm", TrainArguments.algorithm)
    # each evaluation task is played once
    presets = {"num_generations_eval": 1} | dict(lookup(PRESETS, algorithm, kind="algorithm"))
    if path == RECIPES["default"] and has_critic(algorithm):
        presets |= read_config(FOLDER / "default_critic.yaml")
    parser = CommandParser(
        (TrainArguments, config_class(algorithm)),
        program=PROGRAM,
        description="Train a language model in a Gymnasium environment by step-level RL.\n"
        "The defaults shown are those beside what else is on the command line: --model, --config "
        "and\n--algorithm change some.",
        groups=HELP_GROUPS,
        show_all="--help_all" in arguments,
    )
    parser.use_settings(presets, algorithm)
    parser.use_settings(settings, str(path))
    return parser


def make_trainer(options: TrainArguments, config: StepGRPOConfig) -> tuple[StepGRPOTrainer, str]:
    """Load the model and set up the trainer; return it, and what tasks it is evaluated on.

    Raises:
        ConfigurationError: If the model cannot be loaded.
    """
    environment = environment_settings(options)
    model = find_model(options.model or str(TINY_POLICY))
    tokenizer = load_tokenizer(model)
    env_kwargs = fit_environment(tokenizer, options.env, environment["env_kwargs"], say_once)
    make_env = environment_maker(options.env, env_kwargs)
    make_eval_env = environment_maker(options.env, env_kwargs | environment["eval_env_kwargs"])
    if environment["eval_env_kwargs"]:
        tasks = first_tasks(make_eval_env, options.num_eval_tasks)
        split = Split(None, tasks, json.dumps(environment["eval_env_kwargs"]))
    else:
        split = hold_out(make_env, options.num_eval_tasks, config.seed)
    given = config.model_init_kwargs or {}
    config.model_init_kwargs = {**options.load_arguments(), **given}
    trainer = trainer_class(options.algorithm)(
        model=model,
        env=make_env,
        eval_env=make_eval_env,
        args=config,
        train_dataset=split.train and Dataset.from_dict({"task": split.train}),
        eval_dataset=Dataset.from_dict({"task": split.eval}) if split.eval else None,
        processing_class=tokenizer,
        **options.trainer_arguments(),
    )
    return trainer, split.words


def _evaluate_before(trainer: StepGRPOTrainer, *, is_resumed: bool) -> dict[str, float]:
    """Measure the model before training, or read what was measured before the run was cut off."""
    path = Path(trainer.args.output_dir) / EVALUATION_FILE
    if is_resumed and path.exists():
        measured: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        return measured
    before = evaluate(trainer)
    if trainer.accelerator.is_main_process:
        write_json(path, before)
    return before


def say(text: str) -> None:
    """Tell the user something in a line of its own, beside the progress bar."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        sys.stderr.write(f"\n{PROGRAM}: {text}\n")
        sys.stderr.flush()


def say_once(text: str) -> None:
    """Tell the user something that every process knows."""
    if int(os.environ.get("RANK", "0")) == 0:
        say(text)


def begin_run(trainer: StepGRPOTrainer, *, resume: bool) -> str | None:
    """Return the checkpoint to go on from, or None to begin anew, and say which it is."""
    given: str | None = trainer.args.resume_from_checkpoint
    checkpoint = trainer.last_checkpoint() if resume else given
    trainer.begin_run(checkpoint)
    if trainer.accelerator.is_main_process:
        if checkpoint is not None:
            say(f"Going on from {checkpoint}.")
        elif resume:
            say(f"There is no checkpoint of this run in {trainer.args.output_dir} yet: beginning.")
    return checkpoint


def stopped_early(trainer: StepGRPOTrainer, signal_number: int) -> int:
    """Say how to go on with a run that was asked to stop; return the exit code."""
    if trainer.accelerator.is_main_process:
        step, folder = trainer.state.global_step, Path(trainer.args.output_dir)
        say(
            f"Stopped after step {step} of {trainer.state.max_steps}, which is saved in "
            f"{folder / f'checkpoint-{step}'}. The same command with --resume goes on from there."
        )
    # To torchrun any other code is a failure, with a report; the supervisor knows the right one.
    return 0 if STOP_FILE in os.environ else 128 + signal_number


if __name__ == "__main__":
    main()
