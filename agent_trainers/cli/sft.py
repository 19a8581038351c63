"""``agent-r1-sft``: supervised fine-tuning on demonstrations before reinforcement learning.

On an environment's reference actions, recorded trajectories, or conversations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTTrainer

from agent_envs.core.command_line import json_object
from agent_envs.errors import ConfigurationError
from agent_trainers.checkpointing.interruption import Interrupted, StopAtStepEnd, StopRequests
from agent_trainers.cli.arguments import CommandParser, check_range, notifier, read_config
from agent_trainers.cli.environments import (
    DEFAULT_ENV,
    environment_maker,
    first_tasks,
    fit_environment,
    inspect_environment,
)
from agent_trainers.cli.launch import run_trainer
from agent_trainers.cli.output_folder import open_run, settings_of
from agent_trainers.cli.policies import (
    ModelArguments,
    model_path,
    refused_settings,
)
from agent_trainers.cli.train import check_loggers
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.demonstrations import play_reference, read_conversations, retell
from agent_trainers.rollout.environments import template_tools
from agent_trainers.trainers.config import fast_precision
from agent_trainers.trainers.sft import WarmStartConfig, supervised_dataset
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "agent-r1-sft"
notify = notifier(PROGRAM)
DEFAULTS: Final[Mapping[str, Any]] = {
    "num_train_epochs": 1.0, "learning_rate": 2e-4, "per_device_train_batch_size": 8,
    "max_length": 4096, "logging_steps": 1, "save_strategy": "epoch", "save_total_limit": 1,
    "gradient_checkpointing": False, "report_to": "none", "output_dir": "runs/sft",
}  # fmt: skip
SHOWN: Final = (
    "max_length", "bf16", "use_cpu", "lora_alpha", "lora_dropout", "lora_target_modules",
    "load_in_4bit", "num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "gradient_checkpointing", "seed", "output_dir", "report_to",
)  # fmt: skip
"""Options of TRL that ``--help`` shows."""


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
    conversations: str | None = HfArg(
        default=None,
        help="Conversations: rows with OpenAI's 'messages', or TRL's 'prompt' and 'completion'.",
    )
    keep_failures: bool = HfArg(default=False, help="Train on failed episodes, too.")
    resume: bool = HfArg(default=False, help="Resume from the last checkpoint in output_dir.")
    overwrite: bool = HfArg(default=False, help="Delete the run in output_dir first.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_trainer(PROGRAM, run, arguments, notify)


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command line, with the defaults of its file."""
    parser = CommandParser(
        (WarmStartArguments, WarmStartConfig),
        program=PROGRAM,
        description="Train a language model on demonstrations.",
        also_shown=SHOWN,
        show_all="--help_all" in arguments,
    )
    given = parser.given(arguments)
    parser.use_settings(DEFAULTS, PROGRAM)
    if given.model is not None:
        parser.use_settings(fast_precision(), "this machine")
    if given.config is not None:
        parser.use_settings(read_config(Path(given.config)), given.config)
    return parser


def run(arguments: Sequence[str]) -> None:
    """Train on demonstrations."""
    parser = make_parser(arguments)
    options, config = parser.build(parser.read(arguments))
    if options.trajectories and options.conversations:
        raise ConfigurationError("--trajectories and --conversations: give one of the two.")
    check_range(options, "at least 1", lambda value: value >= 1, "num_tasks")
    check_loggers(config)
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    folder = open_run(
        Path(config.output_dir),
        settings_of({"env": options.env, "env_kwargs": env_kwargs}, options, config),
        notify,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint=config.resume_from_checkpoint,
    )
    with folder as begin, StopRequests(notify) as requests:
        model = model_path(options)
        tokenizer = load_tokenizer(model)
        found = list(_demonstrations(options, env_kwargs, tokenizer))
        kept = [t for t in found if options.keep_failures or t.metrics.get("success", 1.0) > 0]
        dataset, num_too_long = supervised_dataset(kept, config.max_length)
        num_trained = sum(label >= 0 for row in dataset["labels"] for label in row)
        notify(
            f"{len(kept)} of {len(found)} demonstrations, {len(dataset)} rows, {num_trained} "
            f"tokens to train; {num_too_long} rows longer than {config.max_length} tokens left out."
        )
        adapters = options.trainer_arguments()
        quantization = {"quantization_config": adapters["quantization_config"]}
        config.model_init_kwargs = {
            **options.load_arguments(),
            **(quantization if quantization["quantization_config"] is not None else {}),
            **(config.model_init_kwargs or {}),
        }
        with refused_settings():
            trainer = SFTTrainer(
                model,
                args=config,
                train_dataset=dataset,
                processing_class=tokenizer,
                peft_config=adapters["peft_config"],
                callbacks=[MetricsLog()],
            )
        begin()
        stop = StopAtStepEnd(requests, trainer.accelerator)
        trainer.add_callback(stop)
        checkpoint = get_last_checkpoint(config.output_dir) if options.resume else None
        trainer.train(resume_from_checkpoint=checkpoint or config.resume_from_checkpoint)
        if stop.stopped_by is not None:
            raise Interrupted(stop.stopped_by)
        trainer.save_model()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if losses:
            notify(f"Loss per token {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates.")
        notify(f"Continue with: agent-r1-train --model {config.output_dir}")


def _demonstrations(
    options: WarmStartArguments, env_kwargs: dict[str, Any], tokenizer: Any
) -> Iterator[Trajectory]:
    """Yield the demonstrations, in the model's tokens."""
    renderer = ChatRenderer(tokenizer)
    if options.conversations is not None:
        yield from read_conversations(options.conversations, renderer)
        return
    env_id = options.env or (DEFAULT_ENV if options.trajectories is None else None)
    tools = None
    if env_id is not None:
        facts = inspect_environment(environment_maker(env_id, env_kwargs), env_id)
        env_kwargs = fit_environment(tokenizer, env_id, env_kwargs, facts, notify)
        make_env = environment_maker(env_id, env_kwargs)
        tools = template_tools(inspect_environment(make_env, env_id).states[0])
    if options.trajectories is not None:
        for trajectory in load_trajectories(options.trajectories):
            yield retell(trajectory, renderer, tools)
        return
    tasks = first_tasks(facts.num_tasks, options.num_tasks)
    played = play_reference(make_env, renderer, tasks)
    yield from tqdm(played, desc="demonstrating", total=len(tasks), unit="episode")


if __name__ == "__main__":
    main()
