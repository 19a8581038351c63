"""``agent-r1-eval``: measure a language model in an environment."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium as gym
from rich.console import Console
from rich.table import Column, Table
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_envs.data.files import write_json
from agent_envs.errors import AgentEnvsError, ConfigurationError
from agent_trainers.cli.arguments import json_object, parse
from agent_trainers.cli.environments import environment_maker, first_tasks
from agent_trainers.cli.models import fit_environment
from agent_trainers.cli.results import EMBEDDED
from agent_trainers.policies import Policy
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.rollout.evaluation import Evaluation, evaluate_policy
from agent_trainers.tiny_policy import TINY_POLICY
from agent_trainers.trajectory import save_trajectories


@dataclass
class EvaluateArguments:
    """What to measure, and how."""

    model: str | None = HfArg(
        default=None,
        help="A causal language model: its name on the hub, a folder, or a GGUF file; the embedded "
        "policy if not given. With base_url, the name under which the server knows the model.",
    )
    dtype: str = HfArg(
        default="auto", help="Type of the model's weights; auto: that they are saved in."
    )
    base_url: str | None = HfArg(
        default=None, help="Ask an OpenAI-compatible server, such as http://localhost:8000/v1."
    )
    api_key_env: str | None = HfArg(
        default=None,
        help="Environment variable with the server's key; OPENAI_API_KEY if not given.",
    )
    max_concurrency: int = HfArg(default=16, help="Requests under way at once, with base_url.")
    request_timeout: float = HfArg(default=300.0, help="Seconds a request may take, with base_url.")
    tool_format: str | None = HfArg(
        default=None,
        help="How the model calls tools; openai: by the server's own function calls. The "
        "environment's own if not given.",
    )
    env: str = HfArg(default="AgentR1/SyntheticMultiHop-v0", help="Gymnasium id to play.")
    env_kwargs: str | None = HfArg(
        default=None,
        help="Keyword arguments of the environment as JSON. The synthetic one plays "
        'held-out worlds unless they say otherwise: \'{"split": "test"}\'.',
    )
    num_tasks: int = HfArg(default=200, help="How many tasks, from the first.")
    samples_per_task: int = HfArg(default=1, help="Episodes of each task.")
    pass_at: list[int] | None = field(
        default=None, metadata={"help": "The k of pass@k; 1 and samples_per_task if not given."}
    )
    greedy: bool = HfArg(default=False, help="Take the most likely token.")
    temperature: float = HfArg(default=1.0, help="Sampling temperature.")
    top_p: float = HfArg(default=1.0, help="Nucleus sampling.")
    top_k: int = HfArg(default=0, help="Sample from this many tokens; 0 for all.")
    max_completion_length: int | None = HfArg(
        default=None, help="Longest turn in tokens; 24 for the embedded policy, else 512."
    )
    batch_size: int = HfArg(default=64, help="Prompts sampled from at once.")
    seed: int = HfArg(default=0, help="Seed of every draw.")
    output: str | None = HfArg(default=None, help="JSON file to write.")
    trajectories: str | None = HfArg(
        default=None, help="File for every episode: .jsonl, .jsonl.gz, .parquet."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    try:
        run(list(sys.argv[1:] if arguments is None else arguments))
    except (AgentEnvsError, gym.error.Error) as error:
        sys.exit(f"agent-r1-eval: {error}")


def run(arguments: Sequence[str]) -> None:
    """Measure the model and show how it did."""
    options = parse(
        arguments,
        EvaluateArguments,
        program="agent-r1-eval",
        description="Measure a language model in a Gymnasium environment.",
    )
    _check(options)
    env_kwargs = json_object(options.env_kwargs, "--env_kwargs")
    if options.env == "AgentR1/SyntheticMultiHop-v0":
        env_kwargs = {"split": "test"} | env_kwargs
    if options.tool_format:
        env_kwargs["tool_format"] = options.tool_format
    if options.base_url is None:
        tokenizer = load_tokenizer(find_model(options.model or str(TINY_POLICY)))
        env_kwargs = fit_environment(tokenizer, options.env, env_kwargs, say)
    make_env = environment_maker(options.env, env_kwargs)
    ks = options.pass_at or sorted({1, options.samples_per_task})
    with _open_policy(options, make_env) as policy:
        evaluation = evaluate_policy(
            make_env,
            policy,
            first_tasks(make_env, options.num_tasks),
            samples_per_task=options.samples_per_task,
            ks=ks,
            seed=options.seed,
        )
    if options.output:
        write_json(options.output, _as_json(options, env_kwargs, evaluation))
    if options.trajectories:
        save_trajectories(options.trajectories, evaluation.trajectories)
    _print_table(options, evaluation)


def say(text: str) -> None:
    """Tell the user something in a line of its own."""
    sys.stderr.write(f"agent-r1-eval: {text}\n")


def _check(options: EvaluateArguments) -> None:
    for name in ("num_tasks", "samples_per_task", "batch_size", "max_concurrency"):
        if (value := getattr(options, name)) < 1:
            raise ConfigurationError(f"--{name} must be at least 1, not {value}.")
    if options.temperature < 0:
        raise ConfigurationError(f"--temperature must not be negative: {options.temperature}.")
    _check_source(options)
    for k in options.pass_at or ():
        if not 1 <= k <= options.samples_per_task:
            raise ConfigurationError(
                f"--pass_at {k} needs --samples_per_task {k} or more, not "
                f"{options.samples_per_task}."
            )


def _check_source(options: EvaluateArguments) -> None:
    if options.base_url is None:
        if options.api_key_env is not None:
            raise ConfigurationError("--api_key_env goes with --base_url.")
        name = options.tool_format
        if name and lookup(TOOL_FORMATS, name, kind="tool format").is_structured:
            raise ConfigurationError(
                f"--tool_format {name} is for served models: pass --base_url, or leave it out and "
                "the chat template of the local model describes the tools."
            )
        return
    if options.model is None:
        raise ConfigurationError("--base_url needs --model: the name the server knows it by.")
    if options.top_k:
        raise ConfigurationError("--top_k is no parameter of OpenAI's API; use --top_p.")


@contextlib.contextmanager
def _open_policy(options: EvaluateArguments, make_env: Callable[[], Any]) -> Iterator[Policy]:
    temperature = 0.0 if options.greedy else options.temperature
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": options.top_p}
    if options.base_url is None or options.model is None:
        yield load_policy(
            options.model or str(TINY_POLICY),
            dtype=options.dtype,
            max_new_tokens=options.max_completion_length,
            **sampling,
            top_k=options.top_k,
            max_batch_size=options.batch_size,
        )
        return
    from agent_trainers.policies.served import OpenAIPolicy

    env = make_env()
    _, info = env.reset(seed=0)
    env.close()
    policy = OpenAIPolicy(
        base_url=options.base_url,
        model=options.model,
        tool_format=info.get("tool_format", "hermes"),
        api_key_env=options.api_key_env,
        max_new_tokens=options.max_completion_length or 512,
        **sampling,
        max_concurrency=options.max_concurrency,
        timeout_seconds=options.request_timeout,
    )
    with contextlib.closing(policy):
        yield policy


def _as_json(
    options: EvaluateArguments, env_kwargs: dict[str, Any], evaluation: Evaluation
) -> dict[str, Any]:
    return {
        "model": options.model or EMBEDDED,
        "base_url": options.base_url,
        "env": options.env,
        "env_kwargs": env_kwargs,
        "sampling": "greedy" if options.greedy else {"temperature": options.temperature,
            "top_p": options.top_p, "top_k": options.top_k},
        "seed": options.seed,
        "num_tasks": len({t.group_id for t in evaluation.trajectories}),
        "samples_per_task": options.samples_per_task,
        "num_failed": evaluation.num_failed,
        "usage": asdict(evaluation.usage),
        "metrics": evaluation.metrics,
        "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
    }  # fmt: skip


def _print_table(options: EvaluateArguments, evaluation: Evaluation) -> None:
    sampling = "greedy" if options.greedy else f"temperature {options.temperature:g}"
    title = f"{options.model or EMBEDDED} on {options.env}, {sampling}"
    table = Table("metric", Column("mean", justify="right"), title=title, min_width=60)
    for name, value in evaluation.metrics.items():
        table.add_row(name, f"{value:.3f}")
    for k, value in evaluation.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{value:.3f}")
    usage = evaluation.usage
    table.caption = (
        f"{len(evaluation.trajectories)} episodes, {evaluation.num_failed} failed; "
        f"{usage.calls} model turns, {usage.prompt_tokens} prompt and {usage.completion_tokens} "
        "completion tokens"
    )
    if failed := [t.error for t in evaluation.trajectories if t.error]:
        table.caption += f"\nthe first failure: {failed[0].strip().splitlines()[-1]}"
    Console().print(table)


if __name__ == "__main__":
    main()
