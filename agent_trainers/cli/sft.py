"""``agent-r1-sft``: supervised fine-tuning on demonstrations before reinforcement learning.

On an environment's reference actions or recorded trajectories.
"""

import functools
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from datasets import Dataset
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg
from trl import SFTConfig, SFTTrainer, get_peft_config

from agent_envs.core.command_line import check_range, counted, json_object
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.batching.rows import make_rows
from agent_trainers.cli.arguments import CommandParser, notifier, run_command
from agent_trainers.cli.config_files import read_settings
from agent_trainers.cli.environments import DEFAULT_ENV, first_tasks, inspect_environment
from agent_trainers.cli.launch import Interrupted, StopRequests
from agent_trainers.cli.model_options import ModelArguments, refused_settings
from agent_trainers.cli.output_folder import COMMAND, open_run, read_arguments, settings_of
from agent_trainers.cli.train import check_loggers
from agent_trainers.monitoring.live_view import is_notebook_command, show_progress
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.policies.models import fast_precision, load_tokenizer, model_path
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference, retell
from agent_trainers.rollout.environments import template_tools
from agent_trainers.trainers.config import check_ranges, follow_the_machine, ignore_renames
from agent_trainers.trainers.resumable import AtomicCheckpoints
from agent_trainers.trainers.scorer import labelled_only
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "agent-r1-sft"
notify = notifier(PROGRAM)
DEFAULTS: Final[Mapping[str, Any]] = {
    "num_train_epochs": 1.0, "learning_rate": 2e-4, "per_device_train_batch_size": 8,
    "max_length": 4096, "logging_steps": 1, "save_strategy": "epoch", "save_total_limit": 1,
    "gradient_checkpointing": False, "report_to": "none", "output_dir": "runs/sft",
}  # fmt: skip


@dataclass
class WarmStartArguments(ModelArguments):
    """Options of ``agent-r1-sft`` besides the trainer's."""

    env: str | None = HfArg(
        default=None,
        help="Gymnasium id of the environment with reference actions; with trajectories, of the "
        "one whose tools are described.",
    )
    env_kwargs: str | None = HfArg(default=None, help="Its keyword arguments as JSON.")
    num_tasks: int = HfArg(default=64, help="Tasks with reference actions, from the first.")
    trajectories: str | None = HfArg(
        default=None, help="Recorded episodes, as agent-r1-eval (also with collect) writes them."
    )
    keep_failures: bool = HfArg(default=False, help="Train on scored episodes that failed, too.")
    resume: bool = HfArg(default=False, help="Resume from the last checkpoint in output_dir.")
    overwrite: bool = HfArg(default=False, help="Delete the run in output_dir first.")


@dataclass
class WarmStartConfig(SFTConfig):  # type: ignore[misc] # TRL is untyped
    """``trl.SFTConfig`` with device and precision of the machine as defaults."""

    def __post_init__(self) -> None:
        """Set device and precision defaults, and check ranges."""
        ignore_renames()
        follow_the_machine(self)
        check_ranges(self)
        super().__post_init__()


class ResumableSFTTrainer(AtomicCheckpoints, SFTTrainer):  # type: ignore[misc] # TRL is untyped
    """``trl.SFTTrainer`` with atomic checkpoints."""


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command line, with the defaults of its file."""
    parser = CommandParser(
        (WarmStartArguments, WarmStartConfig),
        program=PROGRAM,
        description="Train a language model on demonstrations.",
    )
    given = parser.given(arguments)
    parser.use_settings(DEFAULTS, PROGRAM)
    if given.model is not None:
        parser.use_settings(fast_precision(), "this machine")
    if given.config is not None:
        parser.use_settings(read_settings(Path(given.config)), given.config)
    return parser


def run(arguments: Sequence[str]) -> None:
    """Train on demonstrations."""
    arguments, parser, values = read_arguments(make_parser, arguments)
    options, config = parser.build(values)
    check_range(options, "at least 1", "num_tasks")
    for name in ("env_kwargs", "num_tasks") if options.trajectories and not options.env else ():
        if getattr(options, name) != getattr(WarmStartArguments, name):
            raise ConfigurationError(f"--{name} does nothing with --trajectories without --env.")
    check_loggers(config)
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    folder = open_run(
        Path(config.output_dir),
        settings_of({"env": options.env, "env_kwargs": env_kwargs}, options, config)
        | {COMMAND: shlex.join(arguments)},
        notify,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint=config.resume_from_checkpoint,
    )
    with folder as begin, StopRequests(notify) as requests:
        model = model_path(options)
        tokenizer = load_tokenizer(model)
        found = list(_demonstrations(options, env_kwargs, tokenizer))
        scored = [t for t in found if t.is_scorable]
        kept = [t for t in scored if options.keep_failures or t.metrics.get("success", 1.0) > 0]
        if not kept:
            raise DataError(
                f"{options.trajectories or options.env or DEFAULT_ENV}: none of {len(found)} "
                f"demonstrations succeeded, and {len(found) - len(scored)} could not be scored. "
                "Pass others, or --keep_failures to train on those that were scored."
            )
        dataset, num_too_long = supervised_dataset(kept, config.max_length)
        num_trained = sum(label >= 0 for row in dataset["labels"] for label in row)
        notify(
            f"{len(kept)} of {len(found)} demonstrations, {counted(len(dataset), 'row')}, "
            f"{num_trained} tokens to train; {counted(num_too_long, 'row')} longer than "
            f"{config.max_length} tokens left out."
        )
        config.model_init_kwargs = options.load_arguments(config.model_init_kwargs)
        with refused_settings():
            trainer = ResumableSFTTrainer(
                model,
                args=config,
                train_dataset=dataset,
                processing_class=tokenizer,
                peft_config=get_peft_config(options),
                callbacks=[MetricsLog(), requests],
            )
        if not sys.stderr.isatty() or is_notebook_command():
            show_progress(trainer, PROGRAM)
        begin()
        checkpoint = trainer.last_checkpoint() if options.resume else None
        with labelled_only():
            trainer.train(resume_from_checkpoint=checkpoint or config.resume_from_checkpoint)
        if requests.stopped_by is not None:
            raise Interrupted(requests.stopped_by)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if not losses:
            raise ConfigurationError("No optimiser step was taken. Check the number of epochs.")
        trainer.save_model()
        notify(f"Loss per token {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates.")
        following = "Merge the adapters by PEFT's merge_and_unload(), and train the result."
        if not options.use_peft:
            following = f"Continue with: agent-r1-train --model {config.output_dir}"
        notify(following)


def _demonstrations(
    options: WarmStartArguments, env_kwargs: dict[str, Any], tokenizer: Any
) -> Iterable[Trajectory]:
    """Return the demonstrations, in the model's tokens."""
    renderer = ChatRenderer(tokenizer)
    if options.trajectories is not None and options.env is None:
        return (retell(t, renderer, None) for t in load_trajectories(options.trajectories))
    found = inspect_environment(options.env or DEFAULT_ENV, env_kwargs, tokenizer, notify)
    if options.trajectories is not None:
        tools = template_tools(found.states[0])
        return (retell(t, renderer, tools) for t in load_trajectories(options.trajectories))
    tasks = first_tasks(found.num_tasks, options.num_tasks)
    played = play_reference(found.make_env, renderer, tasks)
    return tqdm(played, desc="demonstrating", total=len(tasks), unit="episode", disable=None)


def supervised_dataset(
    trajectories: Iterable[Trajectory], max_length: int | None
) -> tuple[Dataset, int]:
    """Return rows for ``SFTTrainer``, labels on actions only, and the number of rows left out.

    Steps that extend each other share a row, as in reinforcement learning. Rows longer than
    `max_length` are left out, and turns that were cut off are not trained: both would teach to stop
    early.
    """
    rows = [
        row
        for i, t in enumerate(trajectories)
        for row in make_rows(t, i, train_truncated=False)
        if any(row.is_trained)
    ]
    data = [
        {"input_ids": [*row.prompt_ids, *row.completion_ids], "labels": row.labels()}
        for row in rows
    ]
    kept = [each for each in data if max_length is None or len(each["labels"]) <= max_length]
    if not kept:
        raise DataError(
            f"No demonstration is left to train on: {len(data)} rows are longer than "
            f"max_length={max_length}."
        )
    return Dataset.from_list(kept), len(data) - len(kept)


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""

if __name__ == "__main__":
    main()
