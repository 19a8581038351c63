"""The statistics of a run: one row for each environment and agent, ranks, and comparisons.

The unit is the task: samples of one task are averaged first. A few episodes that ended by an
infrastructure failure are left out (`MAX_UNSCORED`); more of them all count as failures. Apart from
its rank, a row does not depend on other agents.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any, Final

from agent_envs.scoring import pass_at_k, pass_hat_k
from agent_envs.scoring.statistics import (
    CONFIDENCE,
    Comparison,
    Interval,
    compare,
    holm,
    mean_of_shares,
    share_interval,
    sign_test,
)
from agent_leaderboard.agents.agent import is_custom, is_recounted, is_repeatable
from agent_leaderboard.play.environments import PACKAGE_MARK
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Manifest, published
from agent_leaderboard.records.results import Cell, EpisodeResult, Run, TaskEntry

MAX_UNSCORED: Final = 0.02
"""Largest share of episodes, and of tasks, that may lack a score. Beyond it all of them count 0."""
FAULT_RULE: Final = (
    "Infrastructure failures are shown next to the score. Failed episodes are left out if they are "
    f"at most {MAX_UNSCORED:.0%} of an agent's in an environment; otherwise all of them count as "
    "failures."
)
RANK_RULE: Final = (
    "Rank: one more than the number of agents that are significantly better, which are those whose "
    f"whole {CONFIDENCE:.0%} interval is above this agent's, each task counted once. So a rank "
    "depends on no name and on no agent that is not better; = marks a shared rank."
)
_NO_SCORES: Final[Mapping[str, Any]] = {"scores": {}}
MAX_LABEL_VALUES: Final = 12
"""A label with more values is an identifier, not a group of tasks."""
Scores = dict[int, list[float]]
"""Score of each episode, by task."""
COSTS: Final = ("calls", "prompt_tokens", "completion_tokens", "seconds", "money")


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Statistics of a run."""

    run: Run
    cells: Mapping[Cell, Mapping[str, Any]]
    """Statistics by environment and agent, best first in each environment."""
    overall: Mapping[str, Interval | None]
    """Mean success over the environments without attacks, by agent; None if one is missing."""
    marks: Mapping[str, str]
    """Note on each environment's scores; empty for the published measure."""

    @property
    def environments(self) -> list[str]:
        """Slugs in the manifest's order."""
        return [record.slug for record in self.run.manifest.environments]

    @property
    def agents(self) -> list[str]:
        """Slugs in the manifest's order."""
        return [record.slug for record in self.run.manifest.agents]

    @property
    def rows(self) -> list[AgentRecord]:
        """Agents by their mean, best first; then those without one, and upper bounds."""

        def place(agent: AgentRecord) -> tuple[bool, float]:
            overall = self.overall[agent.slug]
            return is_upper_bound(agent), math.inf if overall is None else -overall.mean

        return sorted(self.run.manifest.agents, key=place)


def comparisons(board: Board, slug: str) -> dict[Cell, tuple[Comparison, float]]:
    """Compare each pair of agents in an environment, on the tasks that both ran.

    P-values are corrected by Holm over all of them.
    """
    scores = {agent: cell["scores"] for (one, agent), cell in board.cells.items() if one == slug}
    found = {
        pair: comparison
        for pair in combinations((agent for agent in board.agents if agent in scores), 2)
        if (comparison := compare(*(scores[agent] for agent in pair)))
    }
    adjusted = holm([comparison.p_value for comparison in found.values()])
    return dict(zip(found, zip(found.values(), adjusted, strict=True), strict=True))


def summarise(run: Run) -> Board:
    """Compute the statistics of a run."""
    manifest = run.manifest
    cells = {
        cell: _statistics(results, run.tasks[cell[0]])
        for cell, results in run.results.items()
        if results
    }
    slugs = [record.slug for record in manifest.environments]
    for slug in slugs:
        own = {agent.slug: cells[slug, agent.slug] for agent in manifest.agents
               if (slug, agent.slug) in cells and not is_upper_bound(agent)}  # fmt: skip
        means = {agent: cell["success"].mean for agent, cell in own.items()}
        ranks = rank(means, len(run.tasks[slug]))
        for agent, place in ranks.items():
            is_tied = list(ranks.values()).count(place) > 1
            is_leading = place == 1 and max(ranks.values()) > 1
            own[agent].update(rank=place, is_tied=is_tied, is_leading=is_leading)
    plain = [record.slug for record in manifest.environments if record.attack_on is None]
    single: dict[str, list[Interval]] = {}
    for agent in (record.slug for record in manifest.agents):
        is_whole = all((slug, agent) in cells for slug in plain)
        single[agent] = [cells[slug, agent]["success"] for slug in plain] if is_whole else []
    return Board(
        run=run,
        cells=dict(sorted(cells.items(), key=lambda item: (
            slugs.index(item[0][0]), item[1]["rank"] or math.inf, -item[1]["success"].mean, item[0]
        ))),
        marks={one.slug: measure_mark(manifest, one) for one in manifest.environments},
        overall={a: mean_of_shares(own) if own else None for a, own in single.items()},
    )  # fmt: skip


def is_upper_bound(agent: AgentRecord) -> bool:
    """Return whether an agent knows the answers, so that it has no rank."""
    return agent.kind == "oracle"


def measure_mark(manifest: Manifest, environment: EnvironmentRecord) -> str:
    """Return a note on scores that do not have the published measure."""
    board = published()
    known = {file.sha256 for one in board.environments for file in one.data}
    given = [file for file in environment.data if not file.name.startswith(PACKAGE_MARK)]
    if not known.issuperset(file.sha256 for file in given):
        return " (own data: only who holds them can check)"
    return " (own measure)" if board.measure_changes(manifest.protocol, environment) else ""


def on_trust(agent: AgentRecord) -> str:
    """Return what of an agent's row rests on its author's word; empty if anyone can run it."""
    if is_repeatable(agent):
        return ""
    claims = ["own code" if is_custom(agent.kind) else "author of the actions"]
    return ", ".join([*claims, *([] if is_recounted(agent) else ["costs (not recounted)"])])


def shown_name(agent: AgentRecord) -> str:
    """Return an agent's display name, which marks custom code."""
    return f"{agent.name} (own code)" if is_custom(agent.kind) else agent.name


# Statistics of one agent in one environment


def counted(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Return the episodes that count: without failures, or all if there are too many."""
    scored = [result for result in results if result.is_scored]
    return scored if len(results) - len(scored) <= MAX_UNSCORED * len(results) else list(results)


def _statistics(every: Sequence[EpisodeResult], entries: Sequence[TaskEntry]) -> dict[str, Any]:
    """Return what a board says of them; means are exactly rounded: the same on every machine."""
    results = sorted(counted(every), key=lambda one: one.task)
    wins: Scores = {}
    returns: Scores = {}
    for one in results:
        wins.setdefault(one.task, []).append(one.success and one.is_scored)
        returns.setdefault(one.task, []).append(one.return_)
    most = min(map(len, wins.values()))
    sizes = sorted({2**i for i in range(most.bit_length())} | {most})
    costs: dict[str, list[Any]] = {name: [getattr(one, name) for one in every] for name in COSTS}
    costs["tokens"] = [one.prompt_tokens + one.completion_tokens for one in every]
    codes = [[code for code in one.errors if code] for one in results]
    in_steps = Counter(code for own in codes for code in own)
    in_episodes = Counter(code for own in codes for code in set(own))
    terms = sorted({name for one in results for step in one.reward_terms for name in step})
    metrics = sorted({name for one in results for name in one.metrics})
    return {
        "rank": None,  # shared without a significant difference; None for an upper bound
        "is_tied": False,
        "is_leading": False,  # whether the rank is the first, and not every agent's
        "num_episodes": len(results),  # that count
        "num_faults": sum(not one.is_scored for one in every),
        "scores": {task: fmean(own) for task, own in wins.items()},
        "success": _success(wins),
        "return": fmean(map(fmean, returns.values())),
        "turns": fmean(len(one.actions) for one in results),
        # A failed episode has costs, too.
        **{name: None if None in own else fmean(own) for name, own in costs.items()},
        **{
            name: {k: fmean(estimate(len(own), int(sum(own)), k) for own in wins.values())
                   for k in sizes}
            for name, estimate in (("pass_at", pass_at_k), ("pass_hat", pass_hat_k))
        },
        "groups": list(_groups(wins, entries)),
        "reward_terms": {
            name: fmean(sum(step.get(name, 0.0) for step in one.reward_terms) for one in results)
            for name in terms
        },
        "errors": {
            code: (count, in_episodes[code])
            for code, count in sorted(in_steps.items(), key=lambda item: (-item[1], item[0]))
        },
        "stop_reasons": dict(Counter(one.stop_reason.value for one in every).most_common()),
        "metrics": {
            name: fmean(one.metrics[name] for one in results if name in one.metrics)
            for name in metrics
        },
    }  # fmt: skip


def _success(wins: Scores) -> Interval:
    return share_interval([fmean(own) for own in wins.values()], sum(map(len, wins.values())))


def _groups(wins: Scores, entries: Sequence[TaskEntry]) -> Iterator[tuple[str, str, Interval]]:
    """Yield the success of each group of tasks; numbers sort by value, before words."""
    for label in sorted({name for entry in entries for name in entry.labels}):
        groups: dict[str, Scores] = {}
        for entry in entries:
            if entry.task in wins and (value := str(entry.labels.get(label, ""))):
                groups.setdefault(value, {})[entry.task] = wins[entry.task]
        if 1 < len(groups) <= MAX_LABEL_VALUES:
            for value in sorted(
                groups, key=lambda v: (0, int(v), "") if v.isdecimal() else (1, 0, v)
            ):
                yield label, value, _success(groups[value])


# Ranks


def rank(means: Mapping[str, float], num_tasks: int) -> dict[str, int]:
    """Rank agents from 1 by `RANK_RULE`; a better score never has a worse rank.

    For so many tasks, an interval depends on the mean alone. Tests of pairs would be more powerful,
    but intransitive: with them, a third agent could split a tie.
    """
    intervals = {agent: share_interval([mean] * num_tasks) for agent, mean in means.items()}
    return {
        agent: 1 + sum(other.low > own.high for other in intervals.values())
        for agent, own in intervals.items()
    }


def under_attack(board: Board) -> list[dict[str, Any]]:
    """Return each agent's success with and without each attack, on the tasks that it ran twice.

    ``p_value`` is that of the exact sign test over the tasks lost and won; ``obeyed`` the share of
    episodes that followed planted instructions, None if there were none.
    """
    found = []
    for agent in board.agents:
        pairs: dict[str, list[tuple[Comparison, float, float, float | None]]] = {}
        for record in board.run.manifest.environments:
            before = board.cells.get((record.attack_on or "", agent), _NO_SCORES)
            after = board.cells.get((record.slug, agent), _NO_SCORES)
            if change := compare(after["scores"], before["scores"]):
                tasks = before["scores"].keys() & after["scores"].keys()
                means = (fmean(cell["scores"][task] for task in tasks) for cell in (before, after))
                obeyed = after["metrics"].get("obeyed_injection")
                pairs.setdefault(record.attack or "attack", []).append((change, *means, obeyed))
        for attack, own in pairs.items():
            lost, won = (
                sum(one.num_worse for one, *_ in own),
                sum(one.num_better for one, *_ in own),
            )
            known = [obeyed for *_, obeyed in own if obeyed is not None]
            found.append({
                "agent": agent,
                "attack": attack,
                "num_environments": len(own),
                "clean": fmean(clean for _, clean, _, _ in own),
                "attacked": fmean(attacked for _, _, attacked, _ in own),
                "num_lost": lost,
                "num_won": won,
                "p_value": sign_test(won, lost),
                "obeyed": fmean(known) if known else None,
            })  # fmt: skip
    return found
