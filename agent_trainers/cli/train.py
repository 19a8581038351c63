"""``agent-r1-train``: train a language model in an environment.

Without arguments it trains the embedded policy in the synthetic environment, on a CPU.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pandas as pd
from accelerate.utils import gather_object
from transformers.integrations import (
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
    get_reporting_integration_callbacks,
)
from transformers.utils.logging import disable_progress_bar

from agent_envs.core.lookup import require_extra
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    StopAtStepEnd,
    StopRequests,
)
from agent_trainers.cli.arguments import notifier
from agent_trainers.cli.dry_run import dry_run
from agent_trainers.cli.environments import Source, read_source
from agent_trainers.cli.launch import (
    launch_command,
    leave_process_group,
    run_trainer,
    supervise,
)
from agent_trainers.cli.output_folder import EVALUATION_FILE, open_run, settings_of
from agent_trainers.cli.policies import (
    EMBEDDED,
    model_path,
    refused_settings,
)
from agent_trainers.cli.results import SampleCollector, write_results
from agent_trainers.cli.train_options import (
    PROGRAM,
    TrainArguments,
    make_parser,
    parse_arguments,
)
from agent_trainers.monitoring.live_view import show_progress
from agent_trainers.policies.models import keep_to_one_thread, load_tokenizer
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import trainer_class

LOGGERS: Final = {
    "tensorboard": TensorBoardCallback, "trackio": TrackioCallback, "wandb": WandbCallback,
}  # fmt: skip
notify = notifier(PROGRAM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_trainer(PROGRAM, _launch_or_train, arguments, notify)


def _launch_or_train(arguments: list[str]) -> None:
    """Train in this process, or in the processes that it starts; exit with their code."""
    values = make_parser(arguments).read(arguments)
    command = launch_command(
        values.num_processes, values.accelerate_config, "agent_trainers.cli.train", arguments
    )
    if command is not None:
        sys.exit(supervise(command, notify))
    with StopRequests(notify) as requests:
        exit_code = try_batch(arguments) if values.dry_run else run(arguments, requests)
    leave_process_group()
    sys.exit(exit_code)


def try_batch(arguments: Sequence[str]) -> int:
    """Show one batch up to its gradient; see `dry_run`."""
    disable_progress_bar()
    options, config = parse_arguments(arguments)
    config.report_to, config.save_strategy, config.push_to_hub = [], "no", False
    config.disable_tqdm = True
    source = read_source(options)
    trainer, _ = make_trainer(options, config, source)
    checkpoint = trainer.last_checkpoint() if options.resume else config.resume_from_checkpoint
    dry_run(trainer, f"{options.algorithm} on {source.title}", checkpoint)
    return 0


def run(arguments: Sequence[str], requests: StopRequests | None = None) -> int:  # noqa: C901
    """Train, alone or as one of several processes, until done or stopped; return the exit code."""
    started = time.perf_counter()
    disable_progress_bar()  # transformers' bars for loading and saving
    options, config = parse_arguments(arguments)
    source = read_source(options)
    title = f"{options.algorithm} on {source.title}"
    folder = Path(config.output_dir)
    check_loggers(config)
    with contextlib.ExitStack() as stack:
        is_main = int(os.environ.get("RANK", "0")) == 0  # owns the folder
        if is_main:
            begin = stack.enter_context(
                open_run(
                    folder,
                    settings_of(source.settings, options, config),
                    notify,
                    resume=options.resume,
                    overwrite=options.overwrite,
                    checkpoint=config.resume_from_checkpoint,
                )
            )
        notify_once(
            f"{options.recipe}; {options.algorithm}: learning rate {config.learning_rate:g}, "
            f"{config.generation_batch_size} episodes a batch in groups of "
            f"{config.num_generations}, {config.max_steps} steps."
        )
        trainer, evaluated_on = make_trainer(options, config, source)
        keep_to_one_thread(trainer.accelerator.unwrap_model(trainer.model))
        if is_main:
            begin()
        checkpoint = trainer.last_checkpoint() if options.resume else config.resume_from_checkpoint
        if checkpoint is not None:
            notify_once(f"Resuming from {checkpoint}.")
        elif options.resume:
            notify_once(f"No checkpoint in {folder} yet: starting from scratch.")
        collector = SampleCollector(trainer, source.title, options.sample_steps)
        stop = StopAtStepEnd(requests or StopRequests(notify), trainer.accelerator)
        for callback in (stop, collector):
            trainer.add_callback(callback)
        progress = show_progress(trainer, title)
        measured = folder / EVALUATION_FILE
        if checkpoint is not None and measured.exists():
            before = json.loads(measured.read_text(encoding="utf-8"))
        else:
            before = evaluate(trainer)
            if is_main:
                write_json(measured, before)
        with contextlib.closing(progress):
            trainer.train(resume_from_checkpoint=checkpoint)
        step = trainer.state.global_step
        if stop.stopped_by is not None:
            _call_loggers(trainer, "on_train_end")
            notify_once(
                f"Stopped after step {step} of {trainer.state.max_steps}, saved in "
                f"{folder / f'checkpoint-{step}'}. Resume with the same command and --resume."
            )
            # torchrun reports any other code as a failure; the supervisor knows the right one
            return 0 if STOP_FILE in os.environ else 128 + stop.stopped_by
        if step == 0:
            raise ConfigurationError(
                "No optimiser step was taken: there are fewer tasks than one batch needs. Lower "
                "per_device_train_batch_size or num_generations, or add tasks."
            )
        after = evaluate(trainer)
        _call_loggers(trainer, "on_train_end")  # writes out what they hold
        collector.collect_evaluated("evaluation, after training")
        trainer.save_model()
        if trainer.accelerator.is_main_process:
            facts = {
                **source.settings,
                "model": EMBEDDED if options.model is None else options.model,
                "algorithm": options.algorithm,
                "command": shlex.join([PROGRAM, *arguments]),
                "evaluated_on": evaluated_on,
                "total_seconds": round(time.perf_counter() - started, 2),
            }
            write_results(trainer, collector, facts, before, after)
    return 0


def make_trainer(
    options: TrainArguments, config: StepGRPOConfig, source: Source
) -> tuple[StepGRPOTrainer, str]:
    """Load the model; return the trainer, and a description of the evaluation tasks."""
    model = model_path(options)
    tokenizer = load_tokenizer(model)
    tasks = source.tasks(tokenizer, options.num_eval_tasks, config.seed, notify_once)
    config.model_init_kwargs = {**options.load_arguments(), **(config.model_init_kwargs or {})}
    with refused_settings():
        trainer = trainer_class(options.algorithm)(
            model=model,
            args=config,
            processing_class=tokenizer,
            **options.trainer_arguments(),
            **tasks.arguments,
        )
    return trainer, tasks.words


def evaluate(trainer: StepGRPOTrainer) -> dict[str, Any]:
    """Return success, return and number of episodes on the evaluation tasks; empty without any.

    Of several environments, those for training, and under ``envs`` those of each.
    """
    if trainer.eval_dataset is None:
        return {}
    trainer.forget_trajectories("eval")
    # otherwise TensorBoard and trackio would start another run elsewhere; harmless when repeated
    _call_loggers(trainer, "on_train_begin")
    trainer.evaluate()
    played = [(t.env, t.task_id, t.success, t.return_) for t in trainer.trajectories["eval"]]
    episodes = pd.DataFrame(gather_object(played), columns=["env", "task", "success", "return"])
    # Accelerate repeats the first tasks to fill the last batch: they count once
    number = episodes.groupby(["env", "task"]).cumcount()
    episodes = episodes[number < trainer.num_generations_eval]
    if (evaluated := trainer.training_log.evaluated) is None:
        return _figures(episodes)
    return {
        **_figures(episodes[~episodes["env"].isin(evaluated.variants)]),
        "envs": {str(name): _figures(own) for name, own in episodes.groupby("env")},
    }


def _figures(episodes: pd.DataFrame) -> dict[str, Any]:
    if (count := len(episodes)) == 0:
        return {}
    figures = {name: float(sum(episodes[name])) / count for name in ("success", "return")}
    return {**figures, "num_episodes": count}


def notify_once(text: str) -> None:
    """Print a status line, on the main process."""
    if int(os.environ.get("RANK", "0")) == 0:
        notify(text)


def check_loggers(config: Any) -> None:
    """Check that the loggers of ``report_to`` are installed; set ``run_name`` if it is not."""
    with refused_settings():
        get_reporting_integration_callbacks(config.report_to)
    for logger in config.report_to:
        if logger in LOGGERS:
            require_extra("loggers", f"--report_to {logger}", logger)
    config.run_name = config.run_name or Path(config.output_dir).name


def _call_loggers(trainer: Any, event: str) -> None:
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, tuple(LOGGERS.values())):
            getattr(callback, event)(
                trainer.args, trainer.state, trainer.control, model=trainer.model,
                processing_class=trainer.processing_class,
            )  # fmt: skip


if __name__ == "__main__":
    main()
