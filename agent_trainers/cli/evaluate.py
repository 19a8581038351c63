"""``agent-r1-eval``: evaluate a language model in an environment, or in a program.

``agent-r1-eval collect`` keeps the best episodes for ``agent-r1-sft`` (rejection sampling). Its
tasks run in portions that are saved when they are done; the same command resumes after the last.
"""

import contextlib
import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from tqdm.auto import tqdm
from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range, counted, json_object
from agent_envs.core.lookup import lookup
from agent_envs.core.model_server import check_url
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, RolloutError
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.checkpointing.checkpoints import check_writable
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.cli.environments import (
    DEFAULT_ENV,
    OF_PROGRAMS,
    Environment,
    ProgramArguments,
    check_program,
    first_tasks,
    hold_out,
    inspect_environment,
    recorded_member,
    split_tasks,
)
from agent_trainers.cli.output_folder import open_run, settings_of
from agent_trainers.policies import Policy
from agent_trainers.policies.engines import load_engine_policy
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import EMBEDDED, fast_precision, load_tokenizer, model_path
from agent_trainers.policies.served import OpenAIPolicy
from agent_trainers.recipes import find_environment, find_turn_length
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.evaluation import Evaluation, evaluate, plan_samples
from agent_trainers.tasks.env_members import EnvMember
from agent_trainers.trajectory import Trajectory, check_kind, load_trajectories, save_trajectories

PROGRAM: Final = "agent-r1-eval"
TASKS_PER_PORTION: Final = 16
notify = notifier(PROGRAM)


@dataclass
class PolicyArguments:
    """The policy and its environment."""

    model: str | None = HfArg(
        default=None,
        help="Name of a model on the hub, or a folder; default: the embedded policy. With "
        "base_url, the model's name on the server.",
    )
    dtype: str = HfArg(
        default="auto",
        help="Type of the weights; auto: as saved, or bfloat16 on a CPU with instructions for it.",
    )
    use_vllm: bool = HfArg(default=False, help="Sample with vLLM in this process.")
    base_url: str | None = HfArg(
        default=None,
        help="OpenAI-compatible server, such as http://localhost:8000/v1, with the "
        "key in OPENAI_API_KEY.",
    )
    max_concurrency: int = HfArg(default=16, help="Concurrent requests, with base_url.")
    request_timeout: float = HfArg(default=300.0, help="Seconds per request, with base_url.")
    tool_format: str | None = HfArg(
        default=None, help="How the model calls tools; openai: by the server's own function calls."
    )
    env: str | None = HfArg(
        default=None,
        help="Gymnasium id; by default the environment of the run in the model's folder, with its "
        f"tasks, else {DEFAULT_ENV}. Of several it is the name of one.",
    )
    env_kwargs: str | None = HfArg(
        default=None,
        help="Its keyword arguments as JSON instead of the run's; those of the run that differ in "
        "evaluation stay.",
    )
    greedy: bool = HfArg(default=False, help="Take the most likely token.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Sample from this many tokens; 0 for all.")
    max_completion_length: int | None = HfArg(
        default=None, help="Longest turn in tokens; by default that of training, if it is known."
    )
    batch_size: int = HfArg(default=64, help="Prompts per generation batch.")
    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    seed: int = HfArg(default=0, help="Random seed.")

    def __post_init__(self) -> None:
        check_range(self, "at least 1", "batch_size", "max_concurrency",
                    "max_completion_length", "num_tasks", "samples_per_task")  # fmt: skip
        check_range(self, "at least 0", "temperature", "top_k", "seed")
        check_range(self, "in (0, 1]", "top_p")
        check_range(self, "positive", "request_timeout")
        if self.base_url is None:
            name = self.tool_format
            if name and lookup(TOOL_FORMATS, name, kind="tool format").is_structured:
                raise ConfigurationError(f"--tool_format {name} needs a served model: --base_url.")
        elif self.use_vllm:
            raise ConfigurationError("--use_vllm does nothing with --base_url: leave out one.")
        elif self.model is None:
            raise ConfigurationError("--base_url needs --model: the model's name on the server.")
        elif self.top_k:
            raise ConfigurationError("--top_k is not a parameter of OpenAI's API; use --top_p.")
        else:
            check_url("--base_url", self.base_url)


@dataclass
class EvaluateArguments(ProgramArguments, PolicyArguments):
    """Options of ``agent-r1-eval``."""

    samples_per_task: int = HfArg(default=1, help="Episodes of each task.")
    pass_at: list[int] | None = HfArg(
        default=None, help="Values of k for pass@k; 1 and samples_per_task if not given."
    )
    output: str | None = HfArg(default=None, help="JSON file to write.")
    trajectories: str | None = HfArg(
        default=None, help="File for every episode: .jsonl, .jsonl.gz, .parquet."
    )


@dataclass
class CollectArguments(PolicyArguments):
    """Options of ``agent-r1-eval collect``."""

    samples_per_task: int = HfArg(default=4, help="Episodes of each task.")
    keep: int = HfArg(default=1, help="Largest number of episodes of a task to keep.")
    keep_failures: bool = HfArg(
        default=False, help="Keep the best episodes of a task even if none succeeds."
    )
    output: str = HfArg(
        default="collected.jsonl.gz", help="File of the kept episodes: .jsonl, .jsonl.gz, .parquet."
    )


def run(arguments: Sequence[str]) -> None:
    """Evaluate the model, write the files and print the table."""
    if arguments[:1] == ["collect"]:
        collect(arguments[1:])
        return
    options = parse(
        arguments,
        EvaluateArguments,
        program=PROGRAM,
        description="Evaluate a language model in a Gymnasium environment, or in a program. "
        f"{PROGRAM} collect keeps the best episodes; see {PROGRAM} collect --help.",
    )
    held_out = _use_program(options)
    check_program(options)
    check_output("--output", options.output)
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
        if held_out is not None:
            tasks = hold_out(source.num_tasks, *held_out).eval[: options.num_tasks] or tasks
        with open_policy(options) as policy:
            evaluation = evaluate(source.make_rollout(policy), tasks, ks=ks, **settings)
        where = {name: getattr(options, name) for name in ("program", "tasks", "reward")}
    else:
        environment, tasks = open_environment(options)
        with open_policy(options) as policy:
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
                "intervals": evaluation.intervals,
                "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
            },
        )
    if options.trajectories:
        save_trajectories(options.trajectories, evaluation.trajectories)
    _print_table(options, evaluation)
    check_episodes(evaluation.trajectories)


def _use_program(options: EvaluateArguments) -> tuple[int, int] | None:
    """Complete the options from the program that the model was trained in, unless another is given.

    Returns number and seed of the tasks that its run held out, if these are evaluated.
    """
    settings, path = find_environment(None if options.base_url else options.model)
    own = settings.get("program")
    if not own or options.env or options.program not in (None, own):
        return None
    recorded = {**settings, "tasks": settings.get("eval_tasks") or settings.get("tasks")}
    for name in ("program", *OF_PROGRAMS):
        is_default = getattr(options, name, None) == getattr(EvaluateArguments, name, None)
        if hasattr(options, name) and is_default and recorded.get(name) is not None:
            setattr(options, name, recorded[name])
    notify(f"Program {options.program} with the tasks {options.tasks}, as in {path}.")
    is_trained_on = Path(options.tasks or "") == Path(settings.get("tasks") or "")
    if settings.get("eval_tasks") or not is_trained_on:
        return None
    return settings.get("num_eval_tasks", 0), settings.get("seed", 0)


def _print_table(options: EvaluateArguments, evaluation: Evaluation) -> None:
    if not evaluation.metrics:  # no episode was scored, and the error gives the reason
        return
    title = f"{options.model or EMBEDDED} on {options.program or options.env}"
    mean = Column("mean", justify="right")
    table = Table("metric", mean, "95 % interval", title=title, min_width=60)
    num_errors, num_episodes = evaluation.num_failed, len(evaluation.trajectories)
    shown = evaluation.metrics | {f"pass@{k}": v for k, v in evaluation.pass_at_k.items()}
    for name, value in shown.items():
        interval = evaluation.intervals.get(name)
        table.add_row(
            name, f"{value:.3f}", "{:.3f} to {:.3f}".format(*interval) if interval else ""
        )
        if name == "success" and num_errors:  # otherwise errors could be read as success
            table.add_row("  of all, errors as failures", f"{evaluation.success_of_all:.3f}")
            table.add_row("  errors: episodes not scored", f"{num_errors} of {num_episodes}")
    usage = evaluation.usage
    table.caption = (
        f"{counted(num_episodes, 'episode')}, {counted(num_errors, 'error')}; "
        f"{counted(usage.calls, 'model turn')}, "
        f"{usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens"
    )
    Console(markup=False).print(table)


def collect(arguments: Sequence[str]) -> None:
    """Run episodes of each task, and write the best to one file."""
    options = parse(
        arguments,
        CollectArguments,
        program=f"{PROGRAM} collect",
        description="Keep the best episodes of tasks.",
    )
    check_range(options, "at least 1", "keep")
    check_output("--output", options.output, is_trajectories=True)
    output = Path(options.output)
    if output.exists():
        raise ConfigurationError(f"--output: {output} exists. Choose another name.")
    parts = output.with_name(f"{output.name}.parts")
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    settings = settings_of({"env": options.env, "env_kwargs": env_kwargs}, options)
    kept: list[Trajectory] = []
    with open_run(parts, settings, notify, resume=parts.is_dir(), option="--output") as begin:
        environment, tasks = open_environment(options, is_training=True)
        begin()
        with open_policy(options) as policy:
            for first in tqdm(
                range(0, len(tasks), TASKS_PER_PORTION), unit="portion", disable=None
            ):
                part = parts / f"{first:06d}.jsonl.gz"
                if not part.exists():
                    portion = tasks[first : first + TASKS_PER_PORTION]
                    specs = plan_samples(portion, options.samples_per_task, options.seed)
                    with contextlib.closing(Rollout(environment.make_env, policy)) as rollout:
                        episodes = rollout.collect(specs)
                    check_episodes(episodes)  # before saving, so that a failed portion runs again
                    save_trajectories(part, _best(episodes, options))
                kept += load_trajectories(part)
        if kept:
            save_trajectories(output, kept)
    shutil.rmtree(parts)
    if not kept:
        raise RolloutError(
            f"No episode of {len(tasks)} tasks succeeded, so none was kept. Use a better model, "
            "more --samples_per_task, or --keep_failures."
        )
    num_solved = len({t.group_id for t in kept if t.success})
    found = f"{counted(len(kept), 'episode')} of {counted(len(tasks), 'task')}"
    notify(f"{found}, {num_solved} of them solved: {output}")
    hint = f" --env {options.env}" if "tool_format" not in environment.env_kwargs else ""
    hint += f" --model {options.model}" if options.model else ""
    notify(f"Train on them with: agent-r1-sft --trajectories {output}{hint}")


def _best(episodes: Sequence[Trajectory], options: CollectArguments) -> list[Trajectory]:
    """Return the best episodes of each task: the highest return, then the shortest."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in episodes:
        if trajectory.is_scorable and (trajectory.success or options.keep_failures):
            by_task.setdefault(trajectory.group_id, []).append(trajectory)
    for group in by_task.values():
        group.sort(key=lambda t: (-t.success, -t.return_, len(t.transitions)))
    return [trajectory for group in by_task.values() for trajectory in group[: options.keep]]


def check_output(option: str, path: str | None, *, is_trajectories: bool = False) -> None:
    """Raise if `path` cannot be written at the end, or has no known extension of trajectories."""
    if path is None:
        return
    if is_trajectories:
        check_kind(path)
    if Path(path).is_dir():
        raise ConfigurationError(f"{option} {path}: is a folder. Name a file.")
    check_writable(Path(path).parent, option)


def open_environment(
    options: PolicyArguments, *, is_training: bool = False
) -> tuple[Environment, list[int]]:
    """Inspect the environment of the options, fitted to the policy; also return its tasks.

    What is not given is that of the run in the model's folder, and the tasks are those that it
    evaluated, or with `is_training` those that it trained on. Sets the options that are not given.
    """
    given = json_object(options.env_kwargs, "--env_kwargs")
    settings, path = find_environment(None if options.base_url else options.model)
    if (member := recorded_member(settings, options.env, str(path))) is None:
        if options.env is None:
            raise ConfigurationError(
                f"{path} has the program {settings['program']}, and episodes are collected in "
                "environments: name one by --env."
            )
        member, path = EnvMember(id=options.env), None
    own = {} if options.env_kwargs is not None else member.kwargs
    env_kwargs = {**own, **({} if is_training else member.eval_kwargs), **given}
    if options.tool_format:
        env_kwargs["tool_format"] = options.tool_format
    tokenizer = None if options.base_url else load_tokenizer(model_path(options))
    options.env = str(member.id)
    environment = inspect_environment(options.env, env_kwargs, tokenizer, notify)
    options.tool_format = environment.states[0].get("tool_format", options.tool_format)
    tasks = first_tasks(environment.num_tasks, options.num_tasks)
    source = "" if path is None else f", as in {path}"
    has_other_tasks = {"data", "split"} & {*given, *(() if is_training else member.eval_kwargs)}
    if path is not None and not has_other_tasks:
        count, seed = settings.get("num_eval_tasks", 0), settings.get("seed", 0)
        split = split_tasks(member, environment.num_tasks, count, seed)
        chosen = split.train if is_training else split.eval
        if chosen is not None and not chosen:
            source += ": training tasks, since the run held out none"
        tasks = (chosen or tasks)[: options.num_tasks]
    number = counted(len(tasks), "task")
    notify(f"{options.env} {json.dumps(environment.env_kwargs)}, {number}{source}.")
    return environment, tasks


@contextlib.contextmanager
def open_policy(options: PolicyArguments) -> Iterator[Policy]:
    """Load the model or connect to its server, for the duration of the block."""
    sampling: dict[str, Any] = {
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_p": options.top_p,
    }
    if options.base_url is None:
        model = model_path(options)
        trained_for = find_turn_length(model)
        if options.max_completion_length is None and trained_for is not None:
            options.max_completion_length, source = trained_for
            notify(f"Turns have at most {trained_for[0]} tokens, as in training ({source}).")
        # the embedded policy always runs in the type it was saved in
        is_free = options.dtype == "auto" and options.model is not None
        settings = sampling | {
            "dtype": "bfloat16" if is_free and fast_precision() else options.dtype,
            "max_new_tokens": options.max_completion_length,
            "top_k": options.top_k,
        }
        if options.use_vllm:
            yield load_engine_policy(model, **settings)
        else:
            yield load_policy(model, **settings, max_batch_size=options.batch_size)
        return
    policy = OpenAIPolicy(
        base_url=options.base_url,
        model=str(options.model),
        tool_format=options.tool_format or "hermes",
        max_new_tokens=options.max_completion_length or 512,
        **sampling,
        max_concurrency=options.max_concurrency,
        timeout_seconds=options.request_timeout,
    )
    with contextlib.closing(policy):
        yield policy


def check_episodes(trajectories: Sequence[Trajectory]) -> None:
    """Raise `RolloutError` with the first error if most episodes could not be scored."""
    failed = [t for t in trajectories if not t.is_scorable]
    if 2 * len(failed) > len(trajectories):
        error = next((t.error for t in failed if t.error), None) or "no error was recorded"
        raise RolloutError(
            f"{len(failed)} of {len(trajectories)} episodes failed because of errors outside the "
            f"model. The first error: {error.strip().splitlines()[-1]}"
        )


main = functools.partial(run_command, PROGRAM, run)
"""Run the command with arguments, by default those of this process."""

if __name__ == "__main__":
    main()
