"""``agent-r1-eval``: evaluate a language model in an environment, or in a program.

``agent-r1-eval collect`` keeps the best episodes for ``agent-r1-sft`` (rejection sampling).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from transformers.hf_argparser import HfArg

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli import collect
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.cli.environments import (
    ProgramArguments,
    check_program,
    evaluation_defaults,
    first_tasks,
)
from agent_trainers.cli.policies import (
    EMBEDDED,
    PolicyArguments,
    check_episodes,
    check_output,
    check_policy,
    open_environment,
    open_policy,
    take_turn_length,
)
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import Evaluation, evaluate
from agent_trainers.trajectory import save_trajectories

PROGRAM: Final = "agent-r1-eval"
notify = notifier(PROGRAM)


@dataclass
class EvaluateArguments(ProgramArguments, PolicyArguments):
    """Options of ``agent-r1-eval``."""

    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    samples_per_task: int = HfArg(default=1, help="Episodes of each task.")
    pass_at: list[int] | None = HfArg(
        default=None, help="Values of k for pass@k; 1 and samples_per_task if not given."
    )
    seed: int = HfArg(default=0, help="Random seed.")
    output: str | None = HfArg(default=None, help="JSON file to write.")
    trajectories: str | None = HfArg(
        default=None, help="File for every episode: .jsonl, .jsonl.gz, .parquet."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, run, arguments)


def run(arguments: Sequence[str]) -> None:
    """Evaluate the model, write the files and print the table."""
    if arguments[:1] == ["collect"]:
        collect.run(arguments[1:])
        return
    options = parse(
        arguments,
        EvaluateArguments,
        program=PROGRAM,
        description="Evaluate a language model in a Gymnasium environment, or in a program. "
        f"{PROGRAM} collect keeps the best episodes; see {PROGRAM} collect --help.",
    )
    check_policy(options)
    check_program(options)
    if options.output is not None:
        check_output("--output", options.output)
    if options.trajectories is not None:
        check_output("--trajectories", options.trajectories, is_trajectories=True)
    ks = options.pass_at or sorted({1, options.samples_per_task})
    if not 1 <= min(ks) <= max(ks) <= options.samples_per_task:
        raise ConfigurationError(
            f"--pass_at: k is from 1 to --samples_per_task {options.samples_per_task}, not {ks}."
        )
    settings: dict[str, Any] = {"samples_per_task": options.samples_per_task, "seed": options.seed}
    if options.program is not None:
        source = options.program_tasks(options.tasks)
        tasks = first_tasks(source.num_tasks, options.num_tasks)
        take_turn_length(options, notify)
        with open_policy(options) as policy:
            evaluation = evaluate(source.make_rollout(policy), tasks, ks=ks, **settings)
        where = {name: getattr(options, name) for name in ("program", "tasks", "reward")}
    else:
        environment = open_environment(options, notify, **evaluation_defaults(options.env))
        tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
        with open_policy(options, environment) as policy:
            rollout = Rollout(environment.make_env, policy)
            evaluation = evaluate(rollout, tasks, ks=ks, **settings)
        where = {"env": options.env, "env_kwargs": environment.env_kwargs}
    if options.output:
        sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        write_json(
            options.output,
            {
                "model": options.model or EMBEDDED,
                "base_url": options.base_url,
                **where,
                "sampling": "greedy" if options.greedy else sampling,
                "max_completion_length": options.max_completion_length,
                **settings,
                "num_tasks": len({t.group_id for t in evaluation.trajectories}),
                "num_failed": evaluation.num_failed,
                "success_of_all": evaluation.success_of_all,
                "usage": asdict(evaluation.usage),
                "metrics": evaluation.metrics,
                "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
            },
        )
    if options.trajectories:
        save_trajectories(options.trajectories, evaluation.trajectories)
    _print_table(options, evaluation)
    check_episodes(evaluation.trajectories)


def _print_table(options: EvaluateArguments, evaluation: Evaluation) -> None:
    title = f"{options.model or EMBEDDED} on {options.program or options.env}"
    mean = Column("mean", justify="right")
    table = Table("metric", mean, "95 % interval", title=title, min_width=60)
    num_errors, num_episodes = evaluation.num_failed, len(evaluation.trajectories)
    for name, value in evaluation.metrics.items():
        interval = ""
        if name == "success" and options.samples_per_task == 1 and num_episodes > num_errors:
            low, high = wilson_interval(value, num_episodes - num_errors)
            interval = f"{low:.3f} to {high:.3f}"
        table.add_row(name, f"{value:.3f}", interval)
        if name == "success" and num_errors:  # otherwise errors could be read as success
            table.add_row("  of all, errors as failures", f"{evaluation.success_of_all:.3f}")
            table.add_row("  errors: episodes not scored", f"{num_errors} of {num_episodes}")
    for k, value in evaluation.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{value:.3f}")
    usage = evaluation.usage
    table.caption = (
        f"{num_episodes} episodes, {num_errors} errors; {usage.calls} model turns, "
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
    )
    Console().print(table)


if __name__ == "__main__":
    main()
