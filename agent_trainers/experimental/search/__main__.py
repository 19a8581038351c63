"""``python -m agent_trainers.experimental.search``: compare search strategies at equal budget."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Column, Table
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.core.turn_limit import turn_limit_of
from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import first_tasks
from agent_trainers.cli.policies import (
    FittedEnvironment,
    PolicyArguments,
    check_episodes,
    check_output,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.cli.task_sources import evaluation_defaults
from agent_trainers.experimental.search.search import SearchRollout
from agent_trainers.experimental.search.strategies import SEARCHES, SearchKind, SearchSettings
from agent_trainers.experimental.values.__main__ import RESULTS_FILE
from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.rollout.evaluation import Evaluation, evaluate
from agent_trainers.trajectory import save_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.search"
ALL: Final = "all"
_BUDGET_EPISODES: Final = 8
"""Default budget in episodes of full length."""
_BUDGET_STEPS: Final = 80
"""Default budget for an environment without a turn limit."""
notify = notifier(PROGRAM)


@dataclass
class SearchArguments(PolicyArguments):
    """Options of the command."""

    strategies: list[str] = HfArg(
        default_factory=lambda: [ALL],
        help=f"Strategies to compare: {', '.join(SEARCHES)}; or {ALL}. oracle_best_of uses the "
        "environment's rewards and is an upper bound.",
    )
    value: str | None = HfArg(
        default=None,
        help="Folder of a trained value, or of a run with a critic; required by rerank, best_of "
        "and beam.",
    )
    budget_steps: int | None = HfArg(
        default=None,
        help="Environment steps of the search for one episode; by default "
        f"{_BUDGET_EPISODES} episodes of full length.",
    )
    candidates: int = HfArg(default=4, help="Actions tried in a state.")
    beam_width: int = HfArg(default=2, help="States that a beam keeps.")
    num_tasks: int = HfArg(default=200, help="Number of tasks, from the first.")
    samples_per_task: int = HfArg(default=1, help="Episodes per task.")
    seed: int = HfArg(default=0, help="Seed of all draws.")
    output: str | None = HfArg(default=None, help="JSON file for the figures.")
    trajectories: str | None = HfArg(
        default=None, help="File for the episodes of one strategy: .jsonl, .jsonl.gz, .parquet."
    )


def run(arguments: Sequence[str]) -> None:
    """Compare strategies on the same tasks and print a table."""
    options = parse(
        arguments,
        SearchArguments,
        program=PROGRAM,
        description="Compare search strategies on the same tasks, at equal budget.",
    )
    names = _check(options)
    value = None
    if options.value is not None:
        value = ProcessValue.load(options.value)
        for warning in value_warnings(Path(options.value), options.env):
            notify(warning)
    environment = open_environment(options, notify, **evaluation_defaults(options.env))
    budget = options.budget_steps or _default_budget(environment)
    settings = SearchSettings(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(SearchSettings)}
    )
    tasks = first_tasks(environment.facts.num_tasks, options.num_tasks)
    measured: dict[str, Evaluation] = {}
    for name in names:
        kind = SEARCHES[name]
        sampling = dataclasses.replace(options, greedy=options.greedy or kind.is_greedy)
        with open_policy(sampling, environment) as policy:
            notify(f"{name}: at most {budget} steps per episode")
            rollout = SearchRollout(
                environment.make_env,
                policy,
                kind.make_plan(settings),
                budget,
                value=value if kind.uses_value else None,
            )
            measured[name] = evaluate(
                rollout, tasks, samples_per_task=options.samples_per_task, seed=options.seed
            )
    if options.output:
        write_json(options.output, _as_json(options, environment, measured))
    trajectories = [t for evaluation in measured.values() for t in evaluation.trajectories]
    if options.trajectories:
        save_trajectories(options.trajectories, trajectories)
    _print_table(measured, options.env)
    check_episodes(trajectories)


def value_warnings(folder: Path, env: str) -> list[str]:
    """Return the reasons in ``value.json`` why the value in a folder may not guide a search."""
    try:
        measured = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        weak = [
            kind
            for kind, found in measured["reliability"].items()
            if not found["mean_squared_error"] < found["mean_squared_error_of_mean"]
        ]
        trained_in = measured["env"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # the critic of a run has no such file
    warnings = []
    if trained_in != env:
        warnings.append(f"The value in {folder} was trained in {trained_in}, not in {env}.")
    if weak:
        warnings.append(
            f"On held-out tasks, the value in {folder} predicts {' and '.join(weak)} no better "
            "than their mean: a search by it follows noise."
        )
    return warnings


def _check(options: SearchArguments) -> list[str]:
    """Check the options and return the names of the strategies to run."""
    check_policy(options)
    check_range(options, "at least 1", lambda value: value >= 1, "budget_steps", "candidates",
                "beam_width", "num_tasks", "samples_per_task")  # fmt: skip
    names = list(dict.fromkeys(options.strategies))
    if ALL in names:
        names = [n for n, kind in SEARCHES.items() if options.value or not kind.uses_value]
    for name in names:
        if lookup(SEARCHES, name, kind="search strategy").uses_value and options.value is None:
            raise ConfigurationError(
                f"--strategies {name} needs --value: a folder of "
                "python -m agent_trainers.experimental.values, or of a run with a critic."
            )
    if options.trajectories and len(names) > 1:
        raise ConfigurationError(
            "--trajectories stores the episodes of one strategy: pass one --strategies."
        )
    for name in ("output", "trajectories"):
        if (path := getattr(options, name)) is not None:
            check_output(f"--{name}", path, is_trajectories=name == "trajectories")
    return names


def _default_budget(environment: FittedEnvironment) -> int:
    env = environment.make_env()
    limit = turn_limit_of(env)
    env.close()
    return _BUDGET_STEPS if limit is None else _BUDGET_EPISODES * limit


def _needs(kind: SearchKind) -> str:
    return ", ".join(filter(None, (kind.needs, "a value" if kind.uses_value else "")))


def _print_table(measured: dict[str, Evaluation], title: str) -> None:
    columns = [Column(name, justify="right", no_wrap=True) for name in
               ("success", "95 %", "return", "steps", "turns", "tokens")]  # fmt: skip
    table = Table(Column("strategy", no_wrap=True), "needs", *columns, title=title, box=box.SIMPLE)
    for name, evaluation in measured.items():
        num_episodes, metrics = len(evaluation.trajectories), evaluation.metrics
        low, high = wilson_interval(evaluation.success_of_all, num_episodes)
        table.add_row(
            name,
            _needs(SEARCHES[name]),
            f"{evaluation.success_of_all:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{metrics.get('return', math.nan):.3f}",
            f"{metrics.get('search_steps', math.nan):.1f}",
            f"{evaluation.usage.calls / max(1, num_episodes):.1f}",
            f"{metrics.get('search_tokens', math.nan):,.0f}",
        )
    table.caption = "Means per episode over all branches: environment steps, model turns, tokens."
    Console().print(table)


def _as_json(
    options: SearchArguments, environment: FittedEnvironment, measured: dict[str, Evaluation]
) -> dict[str, Any]:
    settings = dataclasses.asdict(options) | {"env_kwargs": environment.env_kwargs}
    return {
        "settings": settings,
        "searches": {
            name: {
                "needs": _needs(SEARCHES[name]),
                "success_of_all": evaluation.success_of_all,
                "num_episodes": len(evaluation.trajectories),
                "num_failed": evaluation.num_failed,
                "usage": dataclasses.asdict(evaluation.usage),
                "metrics": evaluation.metrics,
            }
            for name, evaluation in measured.items()
        },
    }


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
