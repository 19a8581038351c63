"""``python -m agent_trainers.experimental.search``: compare search strategies at equal budget."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import evaluation_defaults, first_tasks
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_episodes,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.experimental.search.search import STRATEGIES, SearchRollout
from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.rollout.evaluation import evaluate

PROGRAM: Final = "python -m agent_trainers.experimental.search"
_BUDGET_EPISODES: Final = 8
_LONGEST_EPISODE: Final = 10
"""Length that the default budget assumes for an environment without a turn limit."""
notify = notifier(PROGRAM)


@dataclass
class SearchArguments(PolicyArguments):
    """Options of the command."""

    strategies: list[str] | None = HfArg(
        default=None,
        help=f"Strategies to compare: {', '.join(STRATEGIES)}; by default all that can be run. "
        "oracle_best_of uses the environment's rewards and is an upper bound.",
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
    seed: int = HfArg(default=0, help="Seed of all draws.")


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
    spec = environment.make_env().spec
    longest = (spec and spec.max_episode_steps) or _LONGEST_EPISODE
    budget = options.budget_steps or _BUDGET_EPISODES * longest
    tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
    for name in names:
        with open_policy(options, environment) as policy:
            rollout = SearchRollout(
                environment.make_env, policy, name, budget=budget, longest=longest, value=value
            )
            found = evaluate(rollout, tasks, seed=options.seed)
        check_episodes(found.trajectories)
        low, high = wilson_interval(found.success_of_all, len(found.trajectories))
        num_tokens = found.usage.prompt_tokens + found.usage.completion_tokens
        sys.stdout.write(
            f"{name:15} success {found.success_of_all:.3f} [{low:.2f}, {high:.2f}]; per episode "
            f"{found.metrics['search_steps']:.1f} steps, "
            f"{num_tokens / len(found.trajectories):,.0f} tokens\n"
        )


def _check(options: SearchArguments) -> list[str]:
    """Check the options and return the names of the strategies to run."""
    check_policy(options)
    check_range(options, "at least 1", lambda value: value >= 1, "budget_steps", "num_tasks")
    names = options.strategies or [n for n, uses in STRATEGIES.items() if options.value or not uses]
    for name in names:
        if lookup(STRATEGIES, name, kind="search strategy") and options.value is None:
            raise ConfigurationError(
                f"--strategies {name} needs --value: a folder of "
                "python -m agent_trainers.experimental.values, or of a run with a critic."
            )
    if options.value is not None and options.base_url is not None:
        raise ConfigurationError("--value needs a local --model: a server returns no token ids.")
    return names


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
