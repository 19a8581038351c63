"""The options of ``agent-r1-train``, and the recipes that set their defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import CommandParser, check_range, read_config
from agent_trainers.cli.environments import DEFAULT_ENV, OF_PROGRAMS, ProgramArguments
from agent_trainers.cli.policies import ModelArguments
from agent_trainers.recipes import ACCELERATE_CONFIGS, FOLDER, RECIPES, find_recipe, find_settings
from agent_trainers.trainers.config import (
    PRESETS,
    StepGRPOConfig,
    config_class,
    fast_precision,
    has_critic,
)

PROGRAM: Final = "agent-r1-train"
SHOWN: Final = (
    "max_completion_length", "bf16", "use_cpu", "lora_alpha", "lora_dropout", "lora_target_modules",
    "load_in_4bit", "loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "beta",
    "use_bias_correction_kl", "num_generations", "temperature", "use_vllm", "vllm_mode",
    "vllm_importance_sampling_mode", "max_steps", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "seed", "output_dir", "save_steps", "report_to", "push_to_hub",
)  # fmt: skip
"""Options of TRL that ``--help`` shows."""
_OF_ENVIRONMENTS: Final = {
    "env", "envs", "env_kwargs", "eval_env_kwargs", "eval_env", "eval_envs"
}  # fmt: skip


@dataclass
class TrainArguments(ProgramArguments, ModelArguments):
    """Options of ``agent-r1-train`` besides the trainer's."""

    env: list[str] | None = HfArg(
        default=None,
        aliases=["--envs"],
        metadata={"action": "extend"},
        help=f"Gymnasium id of the environment ({DEFAULT_ENV} if not given). Several train "
        'together, each an id or \'{"id": ..., "weight": ..., "kwargs": ..., "eval_kwargs": ..., '
        '"name": ..., "tasks": ...}\': groups are drawn by weight, and metrics are reported for '
        "each, too, as env/<name>/success.",
    )
    env_kwargs: str | None = HfArg(
        default=None, help='Keyword arguments of all environments as JSON: \'{"data": "x.jsonl"}\'.'
    )
    eval_env_kwargs: str | None = HfArg(default=None, help="Those that differ in evaluation.")
    eval_envs: list[str] | None = HfArg(
        default=None,
        aliases=["--eval_env", "--eval-env"],
        metadata={"action": "extend"},
        help="Environments for evaluation only, each an id or {id, kwargs, name, tasks}: before "
        "and after training and, unless eval_steps says otherwise, every sixth of it.",
    )
    eval_tasks: str | None = HfArg(default=None, help="With a program: a file of evaluation tasks.")
    frozen_roles: list[str] | None = HfArg(
        default=None, help="Roles of a program that the model acts in without training on them."
    )
    algorithm: str = HfArg(default="grpo_step", help=f"One of {', '.join(PRESETS)}.")
    num_eval_tasks: int = HfArg(
        default=200,
        help="Tasks of each environment for evaluation before and after training. Without "
        "eval_env_kwargs or eval_tasks they are held out of training, at most a fifth of all.",
    )
    sample_steps: int = HfArg(
        default=10,
        help="Steps between samples of trajectories; 0 for the first and the last step only.",
    )
    dry_run: bool = HfArg(
        default=False,
        help="Show one batch up to its gradient, and stop before anything is updated or saved.",
    )
    num_processes: int | None = HfArg(
        default=None, help="Processes that share each batch, on accelerators or the CPU."
    )
    accelerate_config: str | None = HfArg(
        default=None,
        help=f"A file of Accelerate's settings, or one of {', '.join(ACCELERATE_CONFIGS)}.",
    )
    resume: bool = HfArg(
        default=False, help="Resume from the newest complete checkpoint in output_dir, if any."
    )
    overwrite: bool = HfArg(default=False, help="Delete the run in output_dir first.")
    recipe: str = field(default="", init=False)

    def __post_init__(self) -> None:
        """Check ranges and contradictions."""
        super().__post_init__()
        check_range(self, "at least 0", lambda value: value >= 0, "num_eval_tasks", "sample_steps")
        if self.eval_envs is not None and self.num_eval_tasks == 0:
            raise ConfigurationError(
                "--eval_envs does nothing with --num_eval_tasks 0: remove one of them."
            )


def parse_arguments(arguments: Sequence[str]) -> tuple[TrainArguments, StepGRPOConfig]:
    """Parse a command line with its recipe and settings file."""
    parser = make_parser(arguments)
    options, config = parser.build(parser.read(arguments))
    options.recipe = parser.recipe
    return options, config


class _TrainParser(CommandParser):
    recipe = ""
    """The files that set the defaults."""


def make_parser(arguments: Sequence[str]) -> _TrainParser:
    """Return the parser for a command line, with the defaults that hold for it.

    In order of priority: the command line, the file of ``--config``, the recipe, the algorithm's
    preset. The recipe is the one that ``--config`` names, else ``recipe.yaml`` of the model, else
    ``language_model`` with a model and ``default`` without.
    """
    given = CommandParser((TrainArguments,), program=PROGRAM).given(arguments)
    on_command_line = {name: value for name, value in vars(given).items() if value is not None}
    settings: dict[str, Any] = {}
    file = given.config and find_settings(RECIPES, given.config, kind="--config")
    if file is not None:
        settings = _surviving(read_config(file), on_command_line)
    model = given.model or settings.get("model")
    recipe = file if file in RECIPES.values() else find_recipe(model)
    if recipe != file:
        settings = _surviving(read_config(recipe), settings | on_command_line) | settings
    algorithm = given.algorithm or settings.get("algorithm", TrainArguments.algorithm)
    presets = {"num_generations_eval": 1} | dict(lookup(PRESETS, algorithm, kind="algorithm"))
    if recipe == RECIPES["default"] and has_critic(algorithm):
        presets |= read_config(FOLDER / "default_critic.yaml")
    parser = _TrainParser(
        (TrainArguments, config_class(algorithm)),
        program=PROGRAM,
        description="Train a language model in a Gymnasium environment by step-level RL. The "
        "defaults shown hold for the rest of the command line: --model, --config and --algorithm "
        "change some.",
        also_shown=SHOWN,
        show_all="--help_all" in arguments,
    )
    names = {path: name for name, path in RECIPES.items()}
    files = dict.fromkeys(path for path in (recipe, file) if path is not None)
    parser.recipe = f"recipe {', '.join(str(names.get(path, path)) for path in files)}"
    parser.use_settings(presets, algorithm)
    if model:
        parser.use_settings(fast_precision(), "this machine")
    if given.eval_envs or settings.get("eval_envs") or settings.get("eval_env"):
        # not at the last step, since an evaluation follows it
        parser.use_settings({"eval_strategy": "steps", "eval_steps": 0.17}, "eval_envs")
    parser.use_settings(settings, str(file or recipe))
    return parser


def _surviving(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file that still hold under settings `over` it.

    Arguments belong to their environment or program, and go with it.
    """
    env = over.get("env", over.get("envs"))
    own = settings.get("env", settings.get("envs", DEFAULT_ENV))
    dropped: set[str] = set(over)
    if over.get("program") or (env and env not in (own, [own])):
        dropped |= _OF_ENVIRONMENTS
    if env:
        dropped |= {"env", "envs"}
        dropped |= set() if over.get("program") else {"program", *OF_PROGRAMS}
    if over.get("eval_envs") or over.get("eval_env"):
        dropped |= {"eval_env", "eval_envs"}
    return {name: value for name, value in settings.items() if name not in dropped}
