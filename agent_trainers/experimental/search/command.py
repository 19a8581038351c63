"""``agent-r1-eval --search``: ways to search for a good episode, at equal budget, in one table."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Column, Table
from transformers.hf_argparser import HfArg

from agent_envs.core.lookup import lookup
from agent_envs.core.turn_limit import turn_limit_of
from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range
from agent_trainers.cli.environments import first_tasks
from agent_trainers.cli.policies import PolicyArguments, Venue, open_policy
from agent_trainers.experimental.search.search import SearchRollout
from agent_trainers.experimental.search.search_tree import Budget
from agent_trainers.experimental.search.searches import SEARCHES, SearchKind, SearchSettings
from agent_trainers.experimental.values.command import RESULTS_FILE
from agent_trainers.rollout.evaluation import Evaluation, evaluate

ALL: Final = "all"
_EPISODES: Final = 8
"""So many of the longest episodes are the budget where none is given."""
_STEPS: Final = 80
"""The budget where an environment limits no turns."""


@dataclass
class SearchArguments:
    """How to search for a good episode, and what that may cost."""

    search: list[str] | None = HfArg(
        default=None,
        help=f"Compare searches at equal budget: {', '.join(SEARCHES)}; or {ALL}. Those "
        "whose name begins with oracle see the environment's rewards, which no agent at work "
        "knows.",
    )
    value: str | None = HfArg(
        default=None,
        help="What scores states for rerank, best_of, beam and best_first: a folder of "
        "agent-r1-value, or of a run with a critic.",
    )
    budget_steps: int | None = HfArg(
        default=None,
        help="Environment steps (turns that are carried out) that the search for one episode may "
        f"take; {_EPISODES} of the longest episodes if not given.",
    )
    budget_tokens: int | None = HfArg(
        default=None,
        help="Tokens that it may read and write: states, actions and values; no limit if not "
        "given.",
    )
    candidates: int = HfArg(default=4, help="Actions that a search tries in a state.")
    beam_width: int = HfArg(default=2, help="States that a beam goes on from.")
    lookahead: int = HfArg(
        default=1, help="Episodes that an oracle plays from a state to the end, to score it."
    )


OF_SEARCH: Final = tuple(f.name for f in dataclasses.fields(SearchArguments) if f.name != "search")


def check_search(options: Any) -> None:
    """Refuse searches that cannot be made, and their options without a search.

    Raises:
        ConfigurationError: Says what is missing, or does nothing.
    """
    defaults = SearchArguments()
    for name in () if options.search else OF_SEARCH:
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigurationError(f"--{name} does nothing without --search: give it, too.")
    if not options.search:
        return
    if options.program is not None:
        raise ConfigurationError(
            "--search needs an environment that can be set back, and --program is given. Leave one "
            "of them out."
        )
    if options.trajectories and len(_names(options)) > 1:
        raise ConfigurationError("--trajectories holds the episodes of one --search: name one.")
    check_range(options, "at least 1", lambda value: value >= 1, "budget_steps", "budget_tokens",
                "candidates", "beam_width", "lookahead")  # fmt: skip
    for name in _names(options):
        kind = lookup(SEARCHES, name, kind="search")
        if kind.uses_value and options.value is None:
            raise ConfigurationError(
                f"--search {name} needs --value: a folder of agent-r1-value, or of a run with a "
                f"critic. oracle_beam and oracle_best_first need none; they see the rewards."
            )


def compare(
    options: Any, venue: Venue, ks: Sequence[int], say: Callable[[str], None]
) -> dict[str, Evaluation]:
    """Measure each search on the same tasks."""
    value = None
    if options.value is not None:
        from agent_trainers.experimental.values.process_value import ProcessValue

        value = ProcessValue.load(options.value)
        for doubt in doubts_of(Path(options.value), options.env):
            say(doubt)
    elif ALL in options.search:
        left_out = ", ".join(name for name, kind in SEARCHES.items() if kind.uses_value)
        say(f"Without --value there is no {left_out}.")
    budget = Budget(steps=_budget_steps(options, venue), tokens=options.budget_tokens)
    settings = SearchSettings(
        **{f.name: getattr(options, f.name) for f in dataclasses.fields(SearchSettings)}
    )
    tasks = first_tasks(venue.look.num_tasks, options.num_tasks)
    measured: dict[str, Evaluation] = {}
    for name in _names(options):
        kind = SEARCHES[name]
        asked = dataclasses.replace(options, greedy=options.greedy or kind.is_greedy)
        with open_policy(asked, venue) as policy:
            say(f"{name}, with at most {budget.steps} steps for each episode")
            rollout = SearchRollout(
                venue.make_env,
                policy,
                kind.make_plan(settings),
                budget,
                value=value if kind.uses_value else None,
            )
            measured[name] = evaluate(
                rollout, tasks, samples_per_task=options.samples_per_task, ks=ks, seed=options.seed
            )
    return measured


def doubts_of(folder: Path, env: str) -> list[str]:
    """Return why a search by the value in a folder may find nothing, by its own figures."""
    try:
        measured = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
        weak = [
            kind
            for kind, found in measured["reliability"].items()
            if not found["mean_squared_error"] < found["mean_squared_error_of_mean"]
        ]
        trained_in = measured["env"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []  # a critic of a run was never measured
    doubts = []
    if trained_in != env:
        doubts.append(f"The value in {folder} was trained in {trained_in}, not in {env}.")
    if weak:
        doubts.append(
            f"On tasks held out, the value in {folder} is no better for {' and '.join(weak)} than "
            "always saying the mean: what goes by it goes by noise."
        )
    return doubts


def print_comparison(measured: dict[str, Evaluation], title: str) -> None:
    """Show what each search came to, and what it took."""
    columns = [Column(name, justify="right", no_wrap=True) for name in
               ("success", "95 %", "return", "steps", "turns", "tokens")]  # fmt: skip
    table = Table(Column("search", no_wrap=True), "needs", *columns, title=title, box=box.SIMPLE)
    for name, evaluation in measured.items():
        kind, num_episodes = SEARCHES[name], len(evaluation.trajectories)
        low, high = wilson_interval(evaluation.success_of_all, num_episodes)
        metrics = evaluation.metrics
        table.add_row(
            name,
            _needs(kind),
            f"{evaluation.success_of_all:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{metrics.get('return', math.nan):.3f}",
            f"{metrics.get('search_steps', math.nan):.1f}",
            f"{evaluation.usage.calls / max(1, num_episodes):.1f}",
            f"{metrics.get('search_tokens', math.nan):,.0f}",
        )
    table.caption = (
        "Means per episode, in all branches together: steps in the environment, turns of the "
        "policy, tokens read or written, values included."
    )
    Console().print(table)


def as_json(options: Any, measured: dict[str, Evaluation]) -> dict[str, Any]:
    """Return what `print_comparison` shows, and what the searches were allowed."""
    return {
        "settings": {name: getattr(options, name) for name in OF_SEARCH},
        "searches": {
            name: {
                "needs": _needs(SEARCHES[name]),
                "success_of_all": evaluation.success_of_all,
                "num_episodes": len(evaluation.trajectories),
                "num_failed": evaluation.num_failed,
                "usage": dataclasses.asdict(evaluation.usage),
                "metrics": evaluation.metrics,
                "pass_at_k": {str(k): value for k, value in evaluation.pass_at_k.items()},
            }
            for name, evaluation in measured.items()
        },
    }


def _needs(kind: SearchKind) -> str:
    return ", ".join(filter(None, (kind.needs, "a value" if kind.uses_value else "")))


def _names(options: SearchArguments) -> list[str]:
    names = dict.fromkeys(options.search or ())
    if ALL not in names:
        return list(names)
    return [n for n, kind in SEARCHES.items() if not kind.uses_value or options.value is not None]


def _budget_steps(options: PolicyArguments, venue: Venue) -> int:
    given: int | None = getattr(options, "budget_steps", None)
    if given is not None:
        return given
    env = venue.make_env()
    limit = turn_limit_of(env)
    env.close()
    return _STEPS if limit is None else _EPISODES * limit
