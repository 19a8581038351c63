"""``agent-r1-sft``: a supervised warm start, before there is much to reward.

From an environment's own reference actions, from recorded trajectories, or from conversations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from agent_trainers.cli import output_folder
from agent_trainers.cli.arguments import (
    CommandParser,
    check_range,
    read_config,
    speaker,
)
from agent_trainers.cli.environments import environment_maker, first_tasks, look_at
from agent_trainers.cli.first_checks import WARM_START_FOLDER
from agent_trainers.cli.launch import run_trainer
from agent_trainers.cli.loggers import check_loggers
from agent_trainers.cli.models import (
    ModelArguments,
    fit_environment,
    refused_settings,
    write_merged,
)
from agent_trainers.monitoring.metrics_log import MetricsLog
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.rollout.conversations import read_conversations
from agent_trainers.rollout.demonstrations import play_reference, retell
from agent_trainers.rollout.episode import template_tools
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trainers.machine import fast_precision
from agent_trainers.trainers.supervised import WarmStartConfig, supervised_dataset
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "agent-r1-sft"
say = speaker(PROGRAM)
DEFAULTS: Final[Mapping[str, Any]] = {
    "num_train_epochs": 1.0,
    "learning_rate": 2e-4,
    "per_device_train_batch_size": 8,
    "max_length": 4096,
    "logging_steps": 1,
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "output_dir": WARM_START_FOLDER,
}
GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "demonstrations": (
        "env", "env_kwargs", "num_tasks", "trajectories", "conversations", "keep_failures",
    ),
    "model": (
        "model", "dtype", "max_length", "bf16", "use_cpu", "lora_r", "lora_alpha", "lora_dropout",
        "lora_target_modules", "load_in_4bit", "merge_adapter",
    ),
    "optimisation": (
        "num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size",
        "gradient_accumulation_steps", "gradient_checkpointing", "seed",
    ),
    "the run": ("output_dir", "resume", "overwrite", "report_to"),
}  # fmt: skip


@dataclass
class WarmStartArguments(ModelArguments):
    """What to learn from."""

    env: str | None = HfArg(
        default=None,
        help="Gymnasium id whose reference actions are shown; with trajectories, whose tools are "
        "described. AgentR1/SyntheticMultiHop-v0 if nothing else is given.",
    )
    env_kwargs: str | None = HfArg(
        default=None, help="Keyword arguments of the environment as JSON."
    )
    num_tasks: int = HfArg(default=64, help="Tasks whose reference is shown, from the first.")
    trajectories: str | None = HfArg(
        default=None, help="Recorded episodes: .jsonl, .jsonl.gz or .parquet, as agent-r1-collect "
        "and agent-r1-eval write them.",
    )  # fmt: skip
    conversations: str | None = HfArg(
        default=None,
        help="Conversations of others: rows with OpenAI's 'messages', TRL's 'prompt' and "
        "'completion', or 'attempts' of trial and error.",
    )
    keep_failures: bool = HfArg(
        default=False, help="Learn from episodes and conversations that failed, too."
    )
    resume: bool = HfArg(default=False, help="Go on from the last checkpoint in output_dir.")
    overwrite: bool = HfArg(
        default=False, help="Delete the run that output_dir holds, and begin anew."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_trainer(PROGRAM, run, arguments, say)


def run(arguments: Sequence[str]) -> None:
    """Train on demonstrations and say how to go on."""
    options, config = make_parser(arguments).parse(arguments)
    if options.trajectories and options.conversations:
        raise ConfigurationError("--trajectories and --conversations: give one of the two.")
    check_range(options, "at least 1", lambda value: value >= 1, "num_tasks")
    check_loggers(config)
    environment = {
        "env": options.env, "env_kwargs": json_object(options.env_kwargs, "--env_kwargs"),
    }  # fmt: skip
    folder = output_folder.hold_for_run(
        Path(config.output_dir),
        output_folder.settings_of(environment, options, config),
        say,
        resume=options.resume,
        overwrite=options.overwrite,
        checkpoint=config.resume_from_checkpoint,
    )
    with folder as begin, StopRequests(say) as requests:
        _train(options, config, requests, begin)


def make_parser(arguments: Sequence[str]) -> CommandParser:
    """Return the parser of a command line, with its file's defaults."""
    parser = CommandParser(
        (WarmStartArguments, WarmStartConfig),
        program=PROGRAM,
        description="Train a language model on demonstrations before it learns by reward.",
        groups=GROUPS,
        show_all="--help_all" in arguments,
    )
    parser.use_settings(DEFAULTS, PROGRAM)
    given = parser.parse_known_args(list(arguments))[0]
    if given.model is not None:
        parser.use_settings(fast_precision(), "this machine")
    if given.config is not None:
        parser.use_settings(read_config(Path(given.config)), given.config)
    return parser


def _train(
    options: WarmStartArguments,
    config: WarmStartConfig,
    requests: StopRequests,
    begin: Callable[[], None],
) -> None:
    model = find_model(str(TINY_POLICY) if options.model is None else options.model)
    tokenizer = load_tokenizer(model)
    told = list(demonstrations(options, tokenizer))
    kept = [t for t in told if options.keep_failures or t.metrics.get("success", 1.0) > 0]
    dataset, num_too_long = supervised_dataset(kept, config.max_length)
    num_trained = sum(label >= 0 for row in dataset["labels"] for label in row)
    say(
        f"{len(kept)} of {len(told)} demonstrations, {len(dataset)} rows, {num_trained} tokens to "
        f"learn; {num_too_long} rows longer than {config.max_length} tokens left out."
    )
    config.model_init_kwargs = {**options.load_arguments(), **(config.model_init_kwargs or {})}
    adapters = options.trainer_arguments()
    if (quantization := adapters["quantization_config"]) is not None:
        config.model_init_kwargs["quantization_config"] = quantization
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
    if options.merge_adapter:
        say(f"The model with its adapters merged: {write_merged(trainer)}")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if losses:
        say(f"Loss per token {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} updates.")
    say(f"Go on with: agent-r1-train --model {config.output_dir}")


def demonstrations(options: WarmStartArguments, tokenizer: Any) -> Iterator[Trajectory]:
    """Yield what is to be learned from, in the model's tokens."""
    renderer = ChatRenderer(tokenizer)
    if options.conversations is not None:
        yield from read_conversations(
            options.conversations, renderer, keep_failures=options.keep_failures
        )
        return
    env_id = options.env
    if env_id is None and options.trajectories is None:
        env_id = "AgentR1/SyntheticMultiHop-v0"
    tools, make_env = None, None
    if env_id is not None:
        given = json_object(options.env_kwargs, "--env_kwargs")
        look = look_at(environment_maker(env_id, given), env_id)
        fitting = fit_environment(tokenizer, env_id, given, look, say)
        make_env = environment_maker(env_id, fitting)
    if options.trajectories is None:
        assert make_env is not None
        tasks = first_tasks(look.num_tasks, options.num_tasks)
        yield from tqdm(
            play_reference(make_env, renderer, tasks),
            desc="demonstrating", total=len(tasks), unit="episode",
        )  # fmt: skip
        return
    if make_env is not None:
        tools = template_tools(look_at(make_env, str(env_id)).states[0])
    for trajectory in load_trajectories(options.trajectories):
        yield retell(trajectory, renderer, tools)


if __name__ == "__main__":
    main()
