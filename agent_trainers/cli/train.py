"""``agent-r1-train``: train a language model in an environment.

Without arguments it trains the embedded policy on the synthetic environment, on CPU.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from accelerate.utils import gather_object
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar

from agent_envs.data.files import write_json
from agent_trainers.checkpointing.interruption import (
    STOP_FILE,
    StopAtStepEnd,
    StopRequests,
)
from agent_trainers.cli import dry_run, output_folder
from agent_trainers.cli.arguments import speaker
from agent_trainers.cli.env_lists import environments_of, gather_lists
from agent_trainers.cli.launch import (
    launch_command,
    leave_process_group,
    run_trainer,
    supervise,
    unknown_to_accelerate,
)
from agent_trainers.cli.loggers import check_loggers, close_loggers, open_loggers
from agent_trainers.cli.models import EMBEDDED, refused_settings, write_merged
from agent_trainers.cli.output_folder import EVALUATION_FILE
from agent_trainers.cli.played import (
    check_program,
    environments_played,
    look_at_all,
    programs_played,
)
from agent_trainers.cli.results import SampleCollector, describe_run, write_results
from agent_trainers.cli.train_options import (
    PROGRAM,
    TrainArguments,
    environment_settings,
    make_parser,
    parse_arguments,
    title_of,
    what_applies,
)
from agent_trainers.monitoring.live_view import show_progress
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.policies.worker_threads import keep_to_one_thread
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.grpo_config import StepGRPOConfig
from agent_trainers.trainers.presets import trainer_class

say = speaker(PROGRAM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_trainer(PROGRAM, _run_or_launch, arguments, say)


def _run_or_launch(arguments: list[str]) -> NoReturn:
    """Train here, or start the processes that do; exit with their code."""
    arguments = gather_lists(arguments)
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
        dry_run.dry_run(trainer, f"{options.algorithm} on {title_of(options)}", given)
        return 0
    check_loggers(config)
    command = shlex.join([PROGRAM, *arguments])
    if int(os.environ.get("RANK", "0")) != 0:  # the folder is the main process's
        return train(options, config, command, requests)
    settings = output_folder.settings_of(environment_settings(options), options, config)
    with output_folder.hold_for_run(
        Path(config.output_dir),
        settings,
        say,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint=config.resume_from_checkpoint,
    ) as begin:
        return train(options, config, command, requests, begin)


def train(
    options: TrainArguments,
    config: StepGRPOConfig,
    command: str,
    requests: StopRequests | None,
    begin: Callable[[], None] = lambda: None,
) -> int:
    """Train, and leave results in the output folder; return the exit code.

    `begin` is called when the model, the environments and the tasks are there.
    """
    started = time.perf_counter()
    if options.model is not None:
        say_once(what_applies(options, config))
    trainer, evaluated_on = make_trainer(options, config)
    keep_to_one_thread(trainer.accelerator.unwrap_model(trainer.model))
    begin()
    stop = StopAtStepEnd(requests or StopRequests(say), trainer.accelerator)
    trainer.add_callback(stop)
    progress = show_progress(trainer, f"{options.algorithm} on {title_of(options)}")
    collector = SampleCollector(trainer, title_of(options), options.sample_steps)
    trainer.add_callback(collector)
    checkpoint = begin_run(trainer, resume=options.resume)
    before = _evaluate_before(trainer, is_resumed=checkpoint is not None)
    run = {
        **environment_settings(options),
        "evaluated_on": evaluated_on,
        "model": EMBEDDED if options.model is None else options.model,
        "algorithm": options.algorithm,
        "command": command,
    }
    known = describe_run(trainer, run, before, {})
    collector.by_environment = known.get("by_environment", {})
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


def evaluate(trainer: StepGRPOTrainer) -> dict[str, Any]:
    """Play the evaluation tasks; return success, return and number of episodes.

    Empty where there are none. Of several environments those of what is trained in, and under
    ``envs`` those of each.
    """
    if trainer.eval_dataset is None:
        return {}
    trainer.forget_trajectories("eval")
    open_loggers(trainer)
    trainer.evaluate()
    played: dict[tuple[str, str], list[tuple[bool, float]]] = {}
    episodes = [(t.env, t.task_id, t.success, t.return_) for t in trainer.trajectories["eval"]]
    for env, task_id, success, value in gather_object(episodes):
        # Accelerate plays the first tasks again to fill the last batch: they count once.
        if len(samples := played.setdefault((env, task_id), [])) < trainer.num_generations_eval:
            samples.append((success, value))
    by_env: dict[str, list[tuple[bool, float]]] = {}
    for (env, _), samples in played.items():
        by_env.setdefault(env, []).extend(samples)
    evaluated = trainer.training_log.evaluated
    if evaluated is None:
        return _figures(*by_env.values())
    own = {name: by_env[name] for name in evaluated.names if name in by_env}
    in_domain = [samples for name, samples in own.items() if name not in evaluated.variants]
    return {
        **_figures(*in_domain),
        "envs": {name: _figures(samples) for name, samples in own.items()},
    }


def _figures(*played: Sequence[tuple[bool, float]]) -> dict[str, Any]:
    """Return success, return and number of episodes; none of no episodes."""
    counted = [sample for samples in played for sample in samples]
    if not counted:
        return {}
    return {
        "success": sum(success for success, _ in counted) / len(counted),
        "return": sum(value for _, value in counted) / len(counted),
        "num_episodes": len(counted),
    }


def make_trainer(options: TrainArguments, config: StepGRPOConfig) -> tuple[StepGRPOTrainer, str]:
    """Load the model and set up the trainer; return it, and what tasks it is evaluated on.

    Raises:
        ConfigurationError: If the model cannot be loaded.
    """
    check_program(options)
    if options.program is None:
        environments = environments_of(options)
        looks = look_at_all(environments)
    model = find_model(str(TINY_POLICY) if options.model is None else options.model)
    tokenizer = load_tokenizer(model)
    if options.program is not None:
        played = programs_played(options, config.seed)
    else:
        played = environments_played(
            environments, looks, tokenizer, options.num_eval_tasks, config.seed, say_once
        )
    given = config.model_init_kwargs or {}
    config.model_init_kwargs = {**options.load_arguments(), **given}
    with refused_settings():
        trainer = trainer_class(options.algorithm)(
            model=model,
            env=played.source,
            eval_env=played.eval_source,
            eval_envs=played.eval_envs,
            args=config,
            train_dataset=played.train_tasks and Dataset.from_dict({"task": played.train_tasks}),
            eval_dataset=Dataset.from_list(played.eval_rows) if played.eval_rows else None,
            processing_class=tokenizer,
            **options.trainer_arguments(),
        )
    return trainer, played.words


def _evaluate_before(trainer: StepGRPOTrainer, *, is_resumed: bool) -> dict[str, Any]:
    """Measure the model before training, or read what was measured before the run was cut off."""
    path = Path(trainer.args.output_dir) / EVALUATION_FILE
    if is_resumed and path.exists():
        measured: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return measured
    before = evaluate(trainer)
    if trainer.accelerator.is_main_process:
        write_json(path, before)
    return before


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
