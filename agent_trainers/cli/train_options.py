"""The options of ``agent-r1-train``, and the settings files that they stand on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import CommandParser, check_range, read_config
from agent_trainers.cli.env_lists import environments_of, gather_lists
from agent_trainers.cli.first_checks import given_values
from agent_trainers.cli.launch import unknown_to_accelerate
from agent_trainers.cli.models import ModelArguments
from agent_trainers.cli.played import OF_PROGRAMS, ProgramArguments, check_program
from agent_trainers.recipes import ACCELERATE_CONFIGS, FOLDER, RECIPES, find_recipe
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.machine import fast_precision
from agent_trainers.trainers.presets import PRESETS, config_class, has_critic

PROGRAM: Final = "agent-r1-train"
HELP_GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "environment": (
        "env", "env_kwargs", "eval_env_kwargs", "envs", "eval_envs", "num_eval_tasks",
    ),
    "program": ("program", *OF_PROGRAMS),
    "model": (
        "model", "dtype", "max_prompt_length", "max_completion_length", "bf16", "use_cpu", "lora_r",
        "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "merge_adapter",
    ),
    "algorithm": (
        "algorithm", "advantage_estimator", "gamma", "lam", "token_gamma", "token_lam",
        "step_advantage_weight", "loss_type", "loss_denominator", "loss_mask", "advantage_mask",
        "importance_sampling_level", "epsilon", "epsilon_high", "beta", "kl_placement",
        "use_bias_correction_kl", "skill_weight", "skills", "skill_teacher",
        "reward_schedules",
    ),
    "critic": (
        "critic_model", "critic_learning_rate", "critic_warmup_steps", "value_coef",
        "value_clip_range", "bootstrap_truncated",
    ),
    "rollout": (
        "num_generations", "curriculum", "max_extra_groups", "branch_budget", "temperature",
        "step_timeout", "episode_timeout", "group_quorum", "max_fault_share",
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
MEASURED_WHILE_TRAINING: Final = {"eval_strategy": "steps", "eval_steps": 0.17}
"""Not at the last step, since the model is measured after it."""


@dataclass
class TrainArguments(ProgramArguments, ModelArguments):
    """What to train, where, and how it is measured."""

    env: str = HfArg(
        default="AgentR1/SyntheticMultiHop-v0",
        help="Gymnasium id to train in. Given several times, or as JSON, it is an entry of envs.",
    )
    env_kwargs: str | None = HfArg(
        default=None,
        help='Keyword arguments of the environment as JSON: \'{"data": "x.jsonl"}\'. Of several, '
        "those of all that have no others.",
    )
    eval_env_kwargs: str | None = HfArg(
        default=None, help="Those that differ where it is evaluated, as JSON."
    )
    envs: list[str] | None = HfArg(
        default=None,
        help="Several environments to train in, each an id or {id, weight, kwargs, "
        "eval_kwargs, name, tasks}: groups are played in turn by weight, and what is reported "
        "is kept for each, too, as env/<name>/success.",
    )
    eval_envs: list[str] | None = HfArg(
        default=None,
        help="Environments that are never trained in and evaluated as well, each an id or "
        "{id, kwargs, name, tasks}: before and after training and, unless eval_steps says "
        "otherwise, each sixth of it. On a command line also --eval_env, several times.",
    )
    eval_tasks: str | None = HfArg(
        default=None, help="With a program: a file of the tasks on which it is measured."
    )
    frozen_roles: list[str] | None = HfArg(
        default=None, help="Roles of a program that the model plays and does not learn."
    )
    algorithm: str = HfArg(default="grpo_step", help=f"One of {', '.join(PRESETS)}.")
    num_eval_tasks: int = HfArg(
        default=200,
        help="Tasks of each environment played once before and once after training; 0 for none. "
        "Without eval_env_kwargs or eval_tasks they are held out of training, at most a fifth of "
        "all.",
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

    def __post_init__(self) -> None:
        """Check our own.

        Raises:
            ConfigurationError: If a number is out of its range.
        """
        super().__post_init__()
        check_range(self, "at least 0", lambda value: value >= 0, "num_eval_tasks", "sample_steps")
        if self.eval_envs is not None and self.num_eval_tasks == 0:
            raise ConfigurationError(
                "--eval_envs does nothing with --num_eval_tasks 0: leave one of them out."
            )


def parse_arguments(arguments: Sequence[str]) -> tuple[TrainArguments, StepGRPOConfig]:
    """Parse the command line and the settings file."""
    arguments = gather_lists(arguments)
    options, config = make_parser(arguments).parse(arguments, unknown_to_accelerate)
    return options, config


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command line, with its algorithm's options and its file's defaults.

    Without ``--config`` the file is the recipe ``default``; with ``--model`` the one in the model's
    folder, else ``language_model``. A file's arguments of an environment are for its own
    environment only; its environment gives way to a program on the command line, and its program
    to an environment.

    Raises:
        ConfigurationError: If the file is wrong.
        UnknownNameError: If there is no such recipe or algorithm.
    """
    given = given_values(PROGRAM, arguments)
    path = find_recipe(given.config, given.model)
    settings = read_config(path)
    if "env" in settings and "envs" in settings:
        raise ConfigurationError(f"{path}: env and envs: give one of the two.")
    if given.env and given.envs:
        raise ConfigurationError("--env and --envs: give one of the two.")
    of_file = None if "envs" in settings else settings.get("env", TrainArguments.env)
    of_another: set[str] = set()
    if given.program or given.envs or given.env not in (None, of_file):
        of_another |= {"env", "env_kwargs", "eval_env_kwargs", "envs", "eval_envs"}
    if (given.env or given.envs) and not given.program:
        of_another |= {"program", *OF_PROGRAMS}
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
    if given.model or settings.get("model"):
        parser.use_settings(fast_precision(), "this machine")
    if given.eval_envs or settings.get("eval_envs"):
        parser.use_settings(MEASURED_WHILE_TRAINING, "eval_envs")
    parser.use_settings(settings, str(path))
    return parser


def environment_settings(options: TrainArguments) -> dict[str, Any]:
    """Return what is played, and by which arguments: an environment, or a program.

    Raises:
        ConfigurationError: If arguments are no JSON object, or contradict each other.
    """
    check_program(options)
    if options.program is not None:
        names = ("program", "tasks", "eval_tasks", "reward", "frozen_roles")
        return {name: getattr(options, name) for name in names}
    return environments_of(options).as_settings()


def title_of(options: TrainArguments) -> str:
    """Say what is trained in."""
    return options.program or environments_of(options).title


def what_applies(options: TrainArguments, config: StepGRPOConfig) -> str:
    """Say by which settings a model is trained that were not given."""
    device = "the CPU" if config.use_cpu else "the accelerator"
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "float32"
    return (
        f"{options.algorithm} on {device} in {precision}: learning rate {config.learning_rate:g}, "
        f"{config.generation_batch_size} episodes a batch in groups of {config.num_generations}, "
        f"{config.max_steps} steps."
    )
