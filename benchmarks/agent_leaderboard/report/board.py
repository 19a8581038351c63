"""The statistics of a run: a cell for each environment and agent, ranks, and comparisons.

The unit is the task: samples of one task are averaged first. A few episodes that ended by an
infrastructure failure are left out (`MAX_UNSCORED`); more of them all count as failures. A cell
without its rank does not depend on other agents.
"""

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

import gymnasium as gym
import pandas as pd

from agent_envs.scoring import pass_at_k, pass_hat_k
from agent_envs.scoring.statistics import (
    ALPHA,
    Comparison,
    Interval,
    TaskScores,
    compare,
    holm,
    mean_interval,
    mean_of_shares,
    paired_differences,
    paired_test,
    random_effects_mean,
    share_interval,
    sign_test,
)
from agent_leaderboard.agents.agent import is_custom
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
    "Ranks: the agent with the highest score leads. The agents after it share its rank up to the "
    "first whose difference from it is significant; that agent leads the next group, and so on. "
    "A rank is one more than the number of agents in the groups before; = marks a shared rank. "
    "Significance: exact test on the tasks that both ran (McNemar's for one episode per task, sign "
    "flips otherwise), with Holm's correction over all agents compared with the leader, "
    f"{ALPHA:.0%} level."
)
MAX_LABEL_VALUES: Final = 12
"""A label with more values is an identifier, not a group of tasks."""
DIFFICULTIES: Final = ("hops", "level")
"""Labels of the difficulty of tasks."""
_COSTS: Final = ["calls", "prompt_tokens", "completion_tokens", "tokens", "seconds", "money"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStats:
    """Statistics of one agent on one environment."""

    environment: str
    agent: str
    num_episodes: int
    """Episodes that count."""
    num_faults: int
    """Episodes that ended by an infrastructure failure."""
    scores: TaskScores
    """Share of successes of each task."""
    success: Interval | None
    """Share of successes; None if no episode counts."""
    return_: float | None
    """Mean return over tasks."""
    pass_at: Mapping[int, float]
    """pass@k: at least one of k samples succeeds."""
    pass_hat: Mapping[int, float]
    """pass^k: all of k samples succeed."""
    cost: Mapping[str, float | None]
    """Mean cost of an episode; None if unknown."""
    num_steps: float
    """Mean number of turns."""
    groups: Sequence[tuple[str, str, Interval]]
    """Label, value and success of each group of tasks."""
    reward_terms: Mapping[str, float]
    """Mean contribution of each reward term to the return."""
    errors: Mapping[str, tuple[int, int]]
    """Steps and episodes with each error code, the most frequent first."""
    stop_reasons: Mapping[str, int]
    metrics: Mapping[str, float]
    rank: int | None = None
    """Rank, shared without a significant difference; None for an upper bound."""
    is_tied: bool = False
    is_leading: bool = False
    """Whether the rank is the first, and not every agent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Statistics of a run."""

    run: Run
    cells: Mapping[Cell, CellStats]
    """Cells by environment and agent."""
    overall: Mapping[str, Interval | None]
    """Mean success over the environments without attacks, by agent; None if one is missing."""
    elsewhere: Mapping[str, Interval | None]
    """Mean success in the population from which these environments are a sample."""
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

    def compare(self, environment: str, first: str, second: str) -> Comparison | None:
        """Compare two agents on the tasks of an environment that both ran."""
        found = [self.cells.get((environment, agent)) for agent in (first, second)]
        one, other = (cell.scores if cell else {} for cell in found)
        return compare(one, other)

    def comparisons(self) -> dict[tuple[str, str, str], tuple[Comparison, float]]:
        """Compare all pairs of agents; with p-values corrected by Holm for each environment."""
        found: dict[tuple[str, str, str], tuple[Comparison, float]] = {}
        for environment in self.environments:
            pairs = {
                (environment, first, second): comparison
                for first, second in combinations(self.agents, 2)
                if (comparison := self.compare(environment, first, second))
            }
            adjusted = holm([comparison.p_value for comparison in pairs.values()])
            found |= dict(zip(pairs, zip(pairs.values(), adjusted, strict=True), strict=True))
        return found


def summarise(run: Run) -> Board:
    """Compute the statistics of a run."""
    manifest = run.manifest
    cells = {
        cell: _cell(results, run.tasks[cell[0]]) for cell, results in run.results.items() if results
    }
    for environment in manifest.environments:
        ranked = {
            agent.slug: cell.scores
            for agent in manifest.agents
            if (cell := cells.get((environment.slug, agent.slug)))
            and cell.scores
            and not is_upper_bound(agent)
        }
        ranks = ranks_with_ties(ranked)
        for agent_slug, rank in ranks.items():
            key = environment.slug, agent_slug
            cells[key] = dataclasses.replace(
                cells[key],
                rank=rank,
                is_tied=list(ranks.values()).count(rank) > 1,
                is_leading=rank == 1 and max(ranks.values()) > 1,
            )
    plain = [record.slug for record in manifest.environments if record.attack_on is None]
    single: dict[str, list[Interval]] = {}
    for agent in manifest.agents:
        own = [cell.success for slug in plain if (cell := cells.get((slug, agent.slug)))]
        known = [interval for interval in own if interval is not None]
        single[agent.slug] = known if len(known) == len(plain) else []
    return Board(
        run=run,
        cells=cells,
        marks={one.slug: measure_mark(manifest, one) for one in manifest.environments},
        overall={a: mean_of_shares(own) if own else None for a, own in single.items()},
        elsewhere={
            a: random_effects_mean(own) if len(own) > 1 else None for a, own in single.items()
        },
    )


def is_upper_bound(agent: AgentRecord) -> bool:
    """Return whether an agent knows the answers, so that it has no rank."""
    return agent.kind == "oracle"


def measure_mark(manifest: Manifest, environment: EnvironmentRecord) -> str:
    """Return a note on scores that do not have the published measure."""
    reference = published()
    if not reference.has_data(environment):
        return " (own data: only who holds them can check)"
    return " (own measure)" if reference.differences(manifest.protocol, environment) else ""


def shown_name(agent: AgentRecord) -> str:
    """Return an agent's display name, which marks custom code."""
    return f"{agent.name} (own code)" if is_custom(agent.kind) else agent.name


# Cells


def counted(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """Return the episodes that count: without failures, or all if there are too many."""
    scored = [result for result in results if result.is_scored]
    return scored if len(results) - len(scored) <= MAX_UNSCORED * len(results) else list(results)


def success_interval(results: Sequence[EpisodeResult]) -> Interval | None:
    """Estimate the share of successes; None without episodes."""
    return _success(_frame(results)) if results else None


def _frame(results: Sequence[EpisodeResult]) -> pd.DataFrame:
    """Return one row per episode."""
    columns = ("task", "return_", "calls", "prompt_tokens", "completion_tokens", "seconds", "money")
    frame = pd.DataFrame([{name: getattr(one, name) for name in columns} for one in results])
    frame["tokens"] = frame["prompt_tokens"] + frame["completion_tokens"]
    frame["success"] = [float(one.success and one.is_scored) for one in results]
    return frame


def _success(frame: pd.DataFrame) -> Interval | None:
    shares = [_mean(own) for _, own in frame.groupby("task")["success"]]
    return share_interval(shares, len(frame)) if shares else None


def _cell(every: Sequence[EpisodeResult], entries: Sequence[TaskEntry]) -> CellStats:
    results = counted(every)
    frame = _frame(results)
    by_task = frame.groupby("task")
    wins = by_task["success"].agg(["size", "sum"]).astype(int)
    most = int(wins["size"].min())
    sizes = sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})
    labels = pd.DataFrame([entry.labels for entry in entries], [entry.task for entry in entries])
    terms = pd.DataFrame([_total(one.reward_terms) for one in results])
    codes = [[code for code in one.errors if code] for one in results]
    in_steps = Counter(code for own in codes for code in own)
    in_episodes = Counter(code for own in codes for code in set(own))
    metrics = pd.DataFrame([one.metrics for one in results])
    costs = _frame(every)[_COSTS].astype(float)  # a failed episode has costs, too
    return CellStats(
        environment=every[0].environment,
        agent=every[0].agent,
        num_episodes=len(results),
        num_faults=sum(not one.is_scored for one in every),
        scores={int(task): _mean(own) for task, own in by_task["success"]},
        success=_success(frame),
        return_=_mean(_mean(own) for _, own in by_task["return_"]),
        pass_at={k: _mean(pass_at_k(n, right, k) for n, right in wins.to_numpy()) for k in sizes},
        pass_hat={k: _mean(pass_hat_k(n, right, k) for n, right in wins.to_numpy()) for k in sizes},
        cost={name: None if own.isna().any() else _mean(own) for name, own in costs.items()},
        num_steps=_mean(len(one.actions) for one in results),
        groups=list(_groups(frame, labels)),
        reward_terms=_means(terms.fillna(0.0)),
        errors={
            code: (count, in_episodes[code])
            for code, count in sorted(in_steps.items(), key=lambda item: (-item[1], item[0]))
        },
        stop_reasons=dict(Counter(one.stop_reason.value for one in every).most_common()),
        metrics=_means(metrics),
    )


def _total(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for step in steps:
        total.update(step)  # floats add up, too
    return dict(total)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)  # exactly rounded, so tables are the same on every machine


def _means(frame: pd.DataFrame) -> dict[str, float]:
    return {str(name): _mean(frame[name].dropna()) for name in sorted(frame.columns)}


def _groups(frame: pd.DataFrame, labels: pd.DataFrame) -> Iterator[tuple[str, str, Interval]]:
    """Yield the success of each group of tasks; numbers sort by value, before words."""
    for label in sorted(labels.columns):
        values = frame["task"].map({t: str(v) for t, v in labels[label].dropna().items()}).dropna()
        distinct = sorted(
            values.unique(), key=lambda v: (0, int(v), v) if v.isdecimal() else (1, 0, v)
        )
        for value in distinct if 1 < len(distinct) <= MAX_LABEL_VALUES else ():
            success = _success(frame.loc[values.index[values == value]])
            if success is not None:
                yield label, value, success


# Ranks


def ranks_with_ties(scores: Mapping[str, TaskScores]) -> dict[str, int]:
    """Rank agents from 1 by `RANK_RULE`; a better score never has a worse rank.

    An agent that lacks more than `MAX_UNSCORED` of the tasks of others scores 0 on them.
    """
    tasks = frozenset[int]().union(*scores.values())
    filled = {agent: fill_unscored(own, tasks) for agent, own in scores.items()}
    means = {agent: _mean(own.values()) for agent, own in filled.items()}
    waiting = sorted(scores, key=lambda agent: (-means[agent], agent))
    ranks: dict[str, int] = {}
    while waiting:
        leader, *others = waiting
        pairs = [paired_differences(filled[leader], filled[other]) for other in others]
        group = [leader]
        for other, p_value in zip(others, holm([paired_test(one) for one in pairs]), strict=True):
            if p_value < ALPHA and means[other] < means[group[-1]]:
                break
            group.append(other)
        ranks |= dict.fromkeys(group, len(ranks) + 1)
        waiting = waiting[len(group) :]
    return {agent: ranks[agent] for agent in scores}


def fill_unscored(scores: TaskScores, tasks: Iterable[int]) -> dict[int, float]:
    """Return the scores, with 0 for missing tasks if they are more than `MAX_UNSCORED`."""
    tasks = set(tasks)
    missing = tasks - scores.keys()
    if len(missing) <= MAX_UNSCORED * len(tasks):
        return dict(scores)
    return dict(sorted((dict.fromkeys(missing, 0.0) | dict(scores)).items()))


# Slices of a board


def trained_agents(board: Board) -> dict[tuple[str, ...], dict[str, Interval]]:
    """Return agents that differ only in the seed of their training.

    Keys are the slugs of the trainings, values the success by environment, over trainings.
    """
    trainings: defaultdict[str, list[str]] = defaultdict(list)
    for agent in board.run.manifest.agents:
        if agent.train is not None:
            train = {key: value for key, value in agent.train.items() if key != "seed"}
            same = dataclasses.replace(
                agent, slug="a", name="a", train=train, weights_sha256={}, model=None, not_played=[]
            )
            trainings[repr(same)].append(agent.slug)
    found: dict[tuple[str, ...], dict[str, Interval]] = {}
    for slugs in trainings.values():
        for environment in board.environments if len(slugs) > 1 else ():
            cells = [board.cells.get((environment, slug)) for slug in slugs]
            means = [cell.success.mean for cell in cells if cell and cell.success]
            own = found.setdefault(tuple(slugs), {})
            if len(means) == len(slugs):
                own[environment] = _clipped(mean_interval(means))
    return found


def _clipped(interval: Interval) -> Interval:
    low, high = max(0.0, interval.low), min(1.0, interval.high)
    return dataclasses.replace(interval, low=low, high=high)


def family_of(record: EnvironmentRecord) -> str:
    """Return the folder of an environment's class; ``other`` if unknown."""
    spec = gym.registry.get(record.id)
    entry = spec.entry_point if spec is not None else None
    if not isinstance(entry, str) or not entry.startswith("agent_envs.envs."):
        return "other"
    return entry.partition(":")[0].split(".")[2]


def slices(board: Board) -> list[dict[str, Any]]:
    """Return mean success by family, then by difficulty, if there are several of a kind.

    Environments under attack are left out, and agents that lack an environment of a slice.
    """
    shares: defaultdict[tuple[str, str], dict[str, dict[str, Interval]]] = defaultdict(dict)
    for record in board.run.manifest.environments:
        for agent in board.agents if record.attack_on is None else ():
            cell = board.cells.get((record.slug, agent))
            if cell is None or cell.success is None:
                continue
            parts = [("family", family_of(record), cell.success), *cell.groups]
            for kind, value, success in parts:
                if kind in ("family", *DIFFICULTIES):
                    shares[kind, value].setdefault(record.slug, {})[agent] = success
    kinds = Counter(kind for kind, _ in shares)
    order = ["family", *DIFFICULTIES]
    return [
        {
            "kind": kind,
            "name": name,
            "num_environments": len(environments),
            "success": {
                agent: mean_of_shares([one[agent] for one in environments.values()])
                for agent in board.agents
                if all(agent in one for one in environments.values())
            },
        }
        for (kind, name), environments in sorted(
            shares.items(), key=lambda item: (order.index(item[0][0]), item[0])
        )
        if kinds[kind] > 1
    ]


def under_attack(board: Board) -> list[dict[str, Any]]:
    """Return each agent's success with and without each attack, on the tasks that it ran twice.

    ``p_value`` is that of the exact sign test over the tasks lost and won; ``obeyed`` the share of
    episodes that followed planted instructions, None if there were none.
    """
    found = []
    attacks = dict.fromkeys(
        record.attack for record in board.run.manifest.environments if record.attack_on is not None
    )
    for agent in board.agents:
        for attack in attacks:
            pairs, obeyed = [], []
            for record in board.run.manifest.environments:
                before = board.cells.get((record.attack_on or "", agent))
                after = board.cells.get((record.slug, agent))
                if record.attack != attack or before is None or after is None:
                    continue
                pair = pd.DataFrame({"clean": before.scores, "attacked": after.scores}).dropna()
                if len(pair):
                    pairs.append(pair)
                    obeyed.append(after.metrics.get("obeyed_injection"))
            if pairs:
                changes = pd.concat([one["attacked"] - one["clean"] for one in pairs])
                lost, won = int((changes < 0).sum()), int((changes > 0).sum())
                known = [share for share in obeyed if share is not None]
                found.append({
                    "agent": agent,
                    "attack": attack or "attack",
                    "num_environments": len(pairs),
                    "clean": _mean(one["clean"].mean() for one in pairs),
                    "attacked": _mean(one["attacked"].mean() for one in pairs),
                    "num_lost": lost,
                    "num_won": won,
                    "p_value": sign_test(won, lost),
                    "obeyed": _mean(known) if known else None,
                })  # fmt: skip
    return found
