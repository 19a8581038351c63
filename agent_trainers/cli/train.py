"""``agent-r1-train``: train a language model in an environment.

Without arguments it trains the embedded policy in the synthetic environment, on a CPU.
"""

import contextlib
import functools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg
from transformers.integrations import (
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)
from transformers.utils.logging import disable_progress_bar
from trl import get_peft_config

from agent_envs.core.command_line import check_range, counted, json_object
from agent_envs.core.lookup import lookup, require_extra
from agent_envs.errors import ConfigurationError
from agent_trainers.cli.arguments import CommandParser, notifier, run_command
from agent_trainers.cli.config_files import read_config, read_settings
from agent_trainers.cli.environments import (
    DEFAULT_ENV,
    OF_PROGRAMS,
    ProgramArguments,
    Source,
    find_tasks,
    read_source,
)
from agent_trainers.cli.launch import (
    STOP_FILE,
    StopRequests,
    launch_command,
    leave_process_group,
    supervise,
)
from agent_trainers.cli.model_options import ModelArguments, refused_settings
from agent_trainers.cli.output_folder import COMMAND, open_run, read_arguments, settings_of
from agent_trainers.cli.results import LOGGERS, RunFiles, dry_run, print_results
from agent_trainers.monitoring.live_view import show_progress
from agent_trainers.policies.models import (
    EMBEDDED,
    fast_precision,
    keep_to_one_thread,
    load_tokenizer,
    model_path,
)
from agent_trainers.recipes import ACCELERATE_CONFIGS, FOLDER, RECIPES, find_recipe, find_settings
from agent_trainers.tasks.env_members import FIELDS
from agent_trainers.trainers.config import PRESETS, StepGRPOConfig, config_class, has_critic
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import trainer_class

PROGRAM: Final = "agent-r1-train"
_OF_ENVIRONMENTS: Final = {"env", "env_kwargs", "eval_env_kwargs", "eval_envs"}
_ALIASES: Final = {"envs": "env", "eval_env": "eval_envs"}
notify = notifier(PROGRAM)


@dataclass
class TrainArguments(ProgramArguments, ModelArguments):
    """Options of ``agent-r1-train`` besides the trainer's."""

    env: list[str] | None = HfArg(
        default=None,
        aliases=["--envs"],
        metadata={"action": "extend"},
        help=f"Gymnasium id of the environment ({DEFAULT_ENV} if not given), or several, each an "
        f"id or JSON: {{{', '.join(FIELDS)}}}. Groups are drawn by weight.",
    )
    env_kwargs: str | None = HfArg(
        default=None, help='Keyword arguments of all environments as JSON: \'{"data": "x.jsonl"}\'.'
    )
    eval_env_kwargs: str | None = HfArg(default=None, help="Those that differ in evaluation.")
    eval_envs: list[str] | None = HfArg(
        default=None,
        aliases=["--eval_env", "--eval-env"],
        metadata={"action": "extend"},
        help="Environments for evaluation only, each an id or {id, kwargs, name, tasks}.",
    )
    eval_tasks: str | None = HfArg(default=None, help="With a program: a file of evaluation tasks.")
    frozen_roles: list[str] | None = HfArg(
        default=None, help="Roles of a program that the model acts in without training on them."
    )
    algorithm: str = HfArg(
        default="grpo_step",
        help=f"One of {', '.join(PRESETS)}. Start with grpo_step; try gagpo or gigpo where "
        "episodes of a group see the same observations, grpo where only the outcome is rewarded.",
    )
    num_eval_tasks: int = HfArg(
        default=200,
        help="Evaluation tasks of each environment. Without eval_env_kwargs or eval_tasks they "
        "are held out of training, at most a fifth of all.",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "at least 0", "num_eval_tasks")
        if self.eval_envs is not None and self.num_eval_tasks == 0:
            raise ConfigurationError(
                "--eval_envs does nothing with --num_eval_tasks 0: remove one of them."
            )


def run(arguments: Sequence[str]) -> int:
    """Train in this process, or in the processes that it starts; return the exit code."""
    arguments, parser, values = read_arguments(make_parser, arguments)
    command = launch_command(
        values.num_processes, values.accelerate_config, "agent_trainers.cli.train", arguments
    )
    if command is not None:
        return supervise(command, notify)
    disable_progress_bar()  # transformers' bars for loading and saving
    options, config = parser.build(values)
    notify(
        f"recipe {values.recipe}; {options.algorithm}: learning rate {config.learning_rate:g}, "
        f"{config.generation_batch_size} episodes a batch in groups of {config.num_generations}, "
        f"{counted(config.max_steps, 'step')}."
    )
    with StopRequests(notify) as requests:
        exit_code = _train(options, config, arguments, requests)
    leave_process_group()
    return exit_code


def _train(
    options: TrainArguments,
    config: StepGRPOConfig,
    arguments: Sequence[str],
    requests: StopRequests,
) -> int:
    """Train, alone or as one of several processes, until done or stopped; return the exit code."""
    source = read_source(options)
    title = f"{options.algorithm} on {source.title}"
    if options.dry_run:
        config.report_to, config.save_strategy, config.push_to_hub = [], "no", False
        config.disable_tqdm = True
        trainer, _ = make_trainer(options, config, source)
        checkpoint = trainer.last_checkpoint() if options.resume else config.resume_from_checkpoint
        dry_run(trainer, title, checkpoint)
        return 0
    folder = Path(config.output_dir)
    check_loggers(config)
    with open_run(
        folder,
        settings_of(source.settings, options, config) | {COMMAND: shlex.join(arguments)},
        notify,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint=config.resume_from_checkpoint,
    ) as begin:
        trainer, evaluated_on = make_trainer(options, config, source)
        keep_to_one_thread(trainer.accelerator.unwrap_model(trainer.model))
        begin()
        checkpoint = trainer.last_checkpoint() if options.resume else config.resume_from_checkpoint
        if checkpoint is not None:
            notify(f"Resuming from {checkpoint}.")
        elif options.resume:
            notify(f"No checkpoint in {folder} yet: starting from scratch.")
        facts = {
            **source.settings,
            "model": EMBEDDED if options.model is None else options.model,
            "algorithm": options.algorithm,
            COMMAND: shlex.join([PROGRAM, *arguments]),
            "evaluated_on": evaluated_on,
        }
        files = RunFiles(
            trainer, source.title, facts, is_stopped=lambda: requests.stopped_by is not None
        )
        for callback in (requests, files):
            trainer.add_callback(callback)
        progress = show_progress(trainer, title)
        with contextlib.closing(progress):
            trainer.train(resume_from_checkpoint=checkpoint)
        step = trainer.state.global_step
        if requests.stopped_by is not None:
            notify(
                f"Stopped after step {step} of {trainer.state.max_steps}, saved in "
                f"{folder / f'checkpoint-{step}'}. Resume with the same command and --resume."
            )
            # torchrun reports any other code as a failure; the supervisor knows the right one
            return 0 if STOP_FILE in os.environ else 128 + requests.stopped_by
        if files.results:
            print_results(files.results, folder)
    return 0


def make_trainer(
    options: TrainArguments, config: StepGRPOConfig, source: Source
) -> tuple[StepGRPOTrainer, str]:
    """Load the model; return the trainer, and a description of the evaluation tasks."""
    model = model_path(options)
    if Path(model).is_dir() and not (Path(model) / "config.json").is_file():
        raise ConfigurationError(
            f"--model {model} has adapters only. Merge them into their model by PEFT's "
            "merge_and_unload(), and train the result."
        )
    tokenizer = load_tokenizer(model)
    tasks, evaluated_on = find_tasks(options, source, tokenizer, config.seed, notify)
    config.model_init_kwargs = options.load_arguments(config.model_init_kwargs)
    with refused_settings():
        trainer = trainer_class(options.algorithm)(
            model=model,
            args=config,
            processing_class=tokenizer,
            peft_config=get_peft_config(options),
            **tasks,
        )
    return trainer, evaluated_on


def check_loggers(config: Any) -> None:
    """Check that the loggers of ``report_to`` are installed; set ``run_name`` if it is not."""
    with refused_settings():
        get_reporting_integration_callbacks(config.report_to)
    for logger in config.report_to:
        if logger in LOGGERS:
            require_extra("loggers", f"--report_to {logger}", logger)
        elif logger not in get_available_reporting_integrations():
            raise ConfigurationError(f"--report_to {logger}: install its package first.")
    config.run_name = config.run_name or Path(config.output_dir).name


def parse_arguments(arguments: Sequence[str]) -> tuple[TrainArguments, StepGRPOConfig]:
    """Parse a command line with its recipe and settings file."""
    parser = make_parser(arguments)
    options, config = parser.build(parser.read(arguments))
    return options, config


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser for a command line, with the defaults that hold for it.

    In order of priority: the command line, the file of ``--config``, the recipe, the algorithm's
    preset. The recipe is the one that ``--config`` names, else ``recipe.yaml`` of the model, else
    ``language_model`` with a model and ``default`` without. The value ``recipe`` names the files.
    """
    options = vars(CommandParser((TrainArguments,), program=PROGRAM).given(arguments))
    given = {name: value for name, value in options.items() if value is not None}
    settings: dict[str, Any] = {}
    file: Path | None = None
    if (config := given.pop("config", None)) is not None:
        file = find_settings(RECIPES, config, kind="--config")
        settings = _surviving(file, given)
    model = (settings | given).get("model")
    recipe = file if file and file in RECIPES.values() else find_recipe(model)
    if recipe != file:
        settings = _surviving(recipe, settings | given) | settings
    chosen = settings | given
    algorithm = chosen.get("algorithm", TrainArguments.algorithm)
    presets = {"num_generations_eval": 1} | dict(lookup(PRESETS, algorithm, kind="algorithm"))
    if recipe == RECIPES["default"] and has_critic(algorithm):
        presets |= read_config(FOLDER / "default_critic.yaml")
    parser = CommandParser(
        (TrainArguments, config_class(algorithm)),
        program=PROGRAM,
        description="Train a language model by step-level RL. The defaults depend on --model, "
        "--config and --algorithm.",
    )
    names = {path: name for name, path in RECIPES.items()}
    files = dict.fromkeys(path for path in (recipe, file) if path is not None)
    parser.set_defaults(recipe=", ".join(str(names.get(path, path)) for path in files))
    parser.use_settings(presets, algorithm)
    if model:
        parser.use_settings(fast_precision(), "this machine")
    if chosen.get("eval_envs"):
        # not at the last step, since an evaluation follows it
        parser.use_settings({"eval_strategy": "steps", "eval_steps": 0.17}, "eval_envs")
    parser.use_settings(settings, str(file or recipe))
    return parser


def _surviving(file: Path, over: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file that still hold under settings `over` it.

    Arguments belong to their environment or program, and go with it.
    """
    settings = read_settings(file, _ALIASES)
    env, own = over.get("env"), settings.get("env", DEFAULT_ENV)
    dropped: set[str] = set(over)
    if over.get("program") or (env and env not in (own, [own])):
        dropped |= _OF_ENVIRONMENTS
    kwargs = over.get("env_kwargs")
    if "data" in (json_object(kwargs, "--env_kwargs") if isinstance(kwargs, str) else kwargs or ()):
        dropped.add("eval_env_kwargs")  # a split of the public data set
    if env and not over.get("program"):
        dropped |= {"program", *OF_PROGRAMS}
    return {name: value for name, value in settings.items() if name not in dropped}


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""

if __name__ == "__main__":
    main()
