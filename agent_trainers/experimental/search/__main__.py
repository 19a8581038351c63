"""``python -m agent_trainers.experimental.search``: compare search strategies at equal budget."""

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.core.turn_limit import turn_limit_of
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import evaluation_defaults, first_tasks
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_episodes,
    check_output,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.experimental.search.search import STRATEGIES, SearchRollout
from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.rollout.evaluation import evaluate

PROGRAM: Final = "python -m agent_trainers.experimental.search"
ALL: Final = "all"
_BUDGET_EPISODES: Final = 8
_LONGEST_EPISODE: Final = 10
"""Length that the default budget assumes for an environment without a turn limit."""
notify = notifier(PROGRAM)


@dataclass
class SearchArguments(PolicyArguments):
    """Options of the command."""

    strategies: list[str] = HfArg(
        default_factory=lambda: [ALL],
        help=f"Strategies to compare: {', '.join(STRATEGIES)}; or {ALL}. oracle_best_of uses the "
        "environment's rewards and is an upper bound.",
    )
    value: str | None = HfArg(
        default=None,
        help="Folder of a trained value, or of a run with a critic; required by best_of and "
        "best_first.",
    )
    budget_steps: int | None = HfArg(
        default=None,
        help="Environment steps of the search for one episode; by default "
        f"{_BUDGET_EPISODES} episodes of full length.",
    )
    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    samples_per_task: int = HfArg(default=1, help="Episodes per task.")
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output: str | None = HfArg(default=None, help="JSON file for the figures.")


def run(arguments: Sequence[str]) -> None:
    """Compare strategies on the same tasks and print their figures."""
    options = parse(
        arguments,
        SearchArguments,
        program=PROGRAM,
        description="Compare search strategies on the same tasks, at equal budget.",
    )
    names = _check(options)
    environment = open_environment(options, notify, **evaluation_defaults(options.env))
    value = None
    if options.value is not None:
        value = ProcessValue.load(options.value)
        if value.tokenizer.get_vocab() != environment.tokenizer.get_vocab():
            raise ConfigurationError(f"--value {options.value}: its tokenizer is not the model's.")
    longest = turn_limit_of(environment.make_env()) or _LONGEST_EPISODE
    budget = options.budget_steps or _BUDGET_EPISODES * longest
    tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
    searches: dict[str, dict[str, Any]] = {}
    for name in names:
        strategy = STRATEGIES[name]
        sampling = dataclasses.replace(options, greedy=options.greedy or strategy.is_greedy)
        with open_policy(sampling, environment) as policy:
            rollout = SearchRollout(
                environment.make_env,
                policy,
                strategy,
                budget=budget,
                longest=longest,
                value=value if strategy.uses_value else None,
            )
            found = evaluate(
                rollout, tasks, samples_per_task=options.samples_per_task, seed=options.seed
            )
        check_episodes(found.trajectories)
        low, high = wilson_interval(found.success_of_all, len(found.trajectories))
        usage = {k: v / len(found.trajectories) for k, v in dataclasses.asdict(found.usage).items()}
        searches[name] = {
            "needs": strategy.needs,
            "success_of_all": found.success_of_all,
            "num_episodes": len(found.trajectories),
            "num_failed": found.num_failed,
            "usage_per_episode": usage,
            "metrics": found.metrics,
        }
        tokens = usage["prompt_tokens"] + usage["completion_tokens"]
        sys.stdout.write(
            f"{name:15} success {found.success_of_all:.3f} [{low:.2f}, {high:.2f}]; per episode "
            f"{found.metrics['search_steps']:.1f} steps, {tokens:,.0f} tokens\n"
        )
    if options.output:
        settings = dataclasses.asdict(options) | {"env_kwargs": environment.env_kwargs}
        write_json(options.output, {"settings": settings, "searches": searches})


def _check(options: SearchArguments) -> list[str]:
    """Check the options and return the names of the strategies to run."""
    check_policy(options)
    check_range(options, "at least 1", lambda value: value >= 1, "budget_steps", "num_tasks",
                "samples_per_task")  # fmt: skip
    names = list(dict.fromkeys(options.strategies))
    if ALL in names:
        names = [n for n, each in STRATEGIES.items() if options.value or not each.uses_value]
    for name in names:
        if lookup(STRATEGIES, name, kind="search strategy").uses_value and options.value is None:
            raise ConfigurationError(
                f"--strategies {name} needs --value: a folder of "
                "python -m agent_trainers.experimental.values, or of a run with a critic."
            )
    if options.value is not None and options.base_url is not None:
        raise ConfigurationError("--value needs a local --model: a server returns no token ids.")
    if options.output is not None:
        check_output("--output", options.output)
    return names


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
