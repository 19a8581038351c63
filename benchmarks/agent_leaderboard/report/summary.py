"""What a run says about its agents: one cell for each environment and agent, and comparisons.

A few episodes that a fault of the infrastructure ended are left out (`MAX_UNSCORED`); where there
are more, all of them count as failures. A cell does not change when another agent joins the board.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from agent_envs.scoring import pass_at_k, pass_hat_k
from agent_envs.scoring.statistics import (
    Comparison,
    Interval,
    compare,
    holm,
    mean_of_shares,
    random_effects_mean,
    share_interval,
)
from agent_leaderboard.agents.agent import is_own
from agent_leaderboard.records.manifest import AgentRecord, EnvironmentRecord, Manifest
from agent_leaderboard.records.reference import published
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.uncertainty import MAX_UNSCORED, mean_by_task, ranks_with_ties

IMPORTED: Final = "inspect_ai:"
"""Begins the id of an environment that is known from a log only."""
MAX_LABEL_VALUES: Final = 12
"""A label with more values than this is an identifier, and no type to break scores down by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRun:
    """What a run folder holds."""

    manifest: Manifest
    lines: Mapping[tuple[str, str], Sequence[ResultLine]]
    """Episodes by environment and agent."""
    seconds: Mapping[tuple[str, str], Sequence[float]]
    """Seconds of the same episodes, as far as they are known."""

    def task_scores(self, environment: str, agent: str) -> dict[int, float]:
        """Return the share of successes of each task."""
        return success_by_task(counted(self.lines.get((environment, agent), ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What an episode cost, on average."""

    calls: float
    """Calls of the model, retries of the agent included."""
    prompt_tokens: float
    completion_tokens: float
    seconds: float | None
    """Seconds on the machine of the run; None if they were not kept."""
    money: float | None
    """Money by the run's price table; None without a price."""

    @property
    def tokens(self) -> float:
        """Tokens read and written."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The tasks of one kind."""

    label: str
    """What they are told apart by: ``type``."""
    value: str
    """Their kind: ``bridge``."""
    success: Interval
    """How often they were solved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCount:
    """One kind of mistake."""

    code: str
    """As the environment gives it."""
    num_steps: int
    num_episodes: int
    """Episodes that made it at least once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One agent on one environment."""

    environment: str
    agent: str
    num_episodes: int
    """Episodes that count."""
    num_faults: int
    """Episodes that a fault of the infrastructure ended; they count as failures where there are
    more than `MAX_UNSCORED`."""
    success: Interval | None
    """Share of successes; None if no episode counts."""
    return_: float | None
    """Sum of an episode's rewards, on average over tasks."""
    rank: int | None
    """Rank on the environment, shared by agents that cannot be told apart; None without a score,
    and for an upper bound."""
    is_tied: bool
    """Whether another agent shares the rank."""
    is_leading: bool
    """Whether the rank is the first, and not every agent's."""
    pass_at: Mapping[int, float]
    """pass@k: at least one of k samples is right."""
    pass_hat: Mapping[int, float]
    """pass^k: all of k samples are right."""
    cost: Cost
    num_steps: float
    """Turns of an episode, on average."""
    groups: Sequence[Group]
    reward_terms: Mapping[str, float]
    """What each term adds to an episode's return, on average."""
    errors: Sequence[ErrorCount]
    """Mistakes, the most frequent first."""
    stop_reasons: Mapping[str, int]
    """Why episodes ended."""
    metrics: Mapping[str, float]
    """Mean of each metric over the episodes that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A whole leaderboard."""

    run: PlayedRun
    environments: Sequence[str]
    """Slugs, in the manifest's order; those of agents, too."""
    agents: Sequence[str]
    cells: Mapping[tuple[str, str], Cell]
    """Cells by environment and agent; those that were not played are missing."""
    overall: Mapping[str, Interval | None]
    """Mean success over all environments, those under attack aside, by agent; None for those that
    did not play all."""
    marks: Mapping[str, str]
    """What has to stand beside the scores of an environment; empty for those of the reference."""
    elsewhere: Mapping[str, Interval | None]
    """The same for other environments, of which these are a sample."""

    def compare(self, environment: str, first: str, second: str) -> Comparison | None:
        """Compare two agents on the tasks of an environment that both played."""
        one, other = (self.run.task_scores(environment, agent) for agent in (first, second))
        return compare(one, other)

    def comparisons(self) -> dict[tuple[str, str, str], tuple[Comparison, float]]:
        """Compare every two agents on every environment that both played.

        Beside each comparison stands its p-value by Holm, for all of its environment.
        """
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


def read_run(path: Path) -> PlayedRun:
    """Read a run folder; a run under way is read as far as it has come.

    Raises:
        DataError: If a file is missing or malformed; names file, line and field.
    """
    folder = RunFolder(path)
    manifest = folder.read_manifest()
    cells = [
        (environment.slug, agent.slug)
        for environment, agent in manifest.cells
        if folder.results_path(environment.slug, agent.slug).exists()
    ]
    return PlayedRun(
        manifest=manifest,
        lines={cell: folder.read_results(*cell) for cell in cells},
        seconds={c: [line.seconds for line in folder.read_seconds(*c)] for c in cells},
    )


def summarise(run: PlayedRun) -> Board:
    """Summarise a run."""
    environments = [record.slug for record in run.manifest.environments]
    agents = [record.slug for record in run.manifest.agents]
    cells: dict[tuple[str, str], Cell] = {}
    for environment in tqdm(environments, desc="statistics", leave=False):
        played = [agent for agent in agents if run.lines.get((environment, agent))]
        scores = {agent: run.task_scores(environment, agent) for agent in played}
        ranks = ranks_with_ties(
            {
                agent: own
                for agent, own in scores.items()
                if own and not is_upper_bound(run.manifest.agent(agent))
            }
        )
        for agent in played:
            cells[environment, agent] = _cell(run, environment, agent, ranks)
    plain = [record.slug for record in run.manifest.environments if record.attack_on is None]
    single = {agent: _every_interval(cells, plain, agent) for agent in agents}
    return Board(
        run=run,
        environments=environments,
        agents=agents,
        cells=cells,
        marks={one.slug: measure_mark(run.manifest, one) for one in run.manifest.environments},
        overall={a: mean_of_shares(one) if one else None for a, one in single.items()},
        elsewhere={
            a: random_effects_mean(one) if len(one) > 1 else None for a, one in single.items()
        },
    )


def is_upper_bound(agent: AgentRecord) -> bool:
    """Return whether an agent knows the answers: it shows what can be reached, and has no rank."""
    return agent.kind == "oracle"


def is_verifiable(environment: EnvironmentRecord) -> bool:
    """Return whether episodes can be played again; those read from others' logs cannot."""
    return not environment.id.startswith(IMPORTED)


def measure_mark(manifest: Manifest, environment: EnvironmentRecord) -> str:
    """Return what has to stand beside scores that are not those of the published measure."""
    reference = published()
    if not is_verifiable(environment):
        return " (not verifiable)"
    if not reference.has_data(environment):
        return " (own data: only who holds them can check)"
    return " (own measure)" if reference.differences(manifest.protocol, environment) else ""


def shown_name(agent: AgentRecord) -> str:
    """Return an agent's name; it says of one's own that nobody else can ask it again."""
    return f"{agent.name} (own code)" if is_own(agent.kind) else agent.name


def counted(lines: Sequence[ResultLine]) -> list[ResultLine]:
    """Return the episodes that count: without faults, or with them where they are too many."""
    scored = [line for line in lines if line.is_scored]
    return scored if len(lines) - len(scored) <= MAX_UNSCORED * len(lines) else list(lines)


def _cell(run: PlayedRun, environment: str, agent: str, ranks: Mapping[str, int]) -> Cell:
    every = run.lines[environment, agent]
    lines = counted(every)
    rank = ranks.get(agent)
    return Cell(
        environment=environment,
        agent=agent,
        num_episodes=len(lines),
        num_faults=sum(not line.is_scored for line in every),
        success=success_interval(lines),
        return_=_return(lines),
        rank=rank,
        is_tied=rank is not None and list(ranks.values()).count(rank) > 1,
        is_leading=rank == 1 and max(ranks.values()) > 1,
        pass_at=_over_samples(lines, pass_at_k),
        pass_hat=_over_samples(lines, pass_hat_k),
        cost=_cost(every, run.seconds.get((environment, agent), ())),
        num_steps=statistics.fmean(len(line.actions) for line in lines) if lines else 0.0,
        groups=_groups(lines),
        reward_terms=_reward_terms(lines),
        errors=_errors(lines),
        stop_reasons=dict(Counter(line.stop_reason.value for line in every).most_common()),
        metrics=_metrics(lines),
    )


def _every_interval(
    cells: Mapping[tuple[str, str], Cell], environments: Sequence[str], agent: str
) -> list[Interval]:
    """Return an agent's shares of all environments; none if it left one out."""
    own = [cells[one, agent].success for one in environments if (one, agent) in cells]
    known = [one for one in own if one is not None]
    return known if len(known) == len(environments) else []


def success_by_task(lines: Iterable[ResultLine]) -> dict[int, float]:
    """Return the share of successes of each task."""
    return mean_by_task((line.task, float(line.success and line.is_scored)) for line in lines)


def success_interval(lines: Sequence[ResultLine]) -> Interval | None:
    """Estimate the share of successes; None without episodes."""
    shares = list(success_by_task(lines).values())
    return share_interval(shares, len(lines)) if shares else None


def _return(lines: Sequence[ResultLine]) -> float | None:
    by_task = mean_by_task((line.task, line.return_) for line in lines)
    return statistics.fmean(by_task.values()) if by_task else None


def _over_samples(
    lines: Sequence[ResultLine], estimate: Callable[[int, int, int], float]
) -> dict[int, float]:
    """Estimate pass@k or pass^k for k = 1, 2, 4, … and the smallest number of samples."""
    samples = Counter(line.task for line in lines)
    right = Counter(line.task for line in lines if line.success and line.is_scored)
    most = min(samples.values(), default=0)
    powers = {2**i for i in range(most.bit_length()) if 2**i <= most}
    return {
        k: statistics.fmean(estimate(n, right[task], k) for task, n in samples.items())
        for k in sorted(powers | ({most} if most else set()))
    }


def _cost(lines: Sequence[ResultLine], seconds: Sequence[float]) -> Cost:
    """Average over all episodes: one that a fault ended has cost something, too."""
    usages = [line.usage for line in lines]
    money = [usage.money for usage in usages if usage.money is not None]
    return Cost(
        calls=statistics.fmean(usage.calls for usage in usages),
        prompt_tokens=statistics.fmean(usage.prompt_tokens for usage in usages),
        completion_tokens=statistics.fmean(usage.completion_tokens for usage in usages),
        seconds=statistics.fmean(seconds) if len(seconds) else None,
        money=statistics.fmean(money) if len(money) == len(usages) else None,
    )


def _groups(lines: Sequence[ResultLine]) -> list[Group]:
    by_kind: defaultdict[tuple[str, str], list[ResultLine]] = defaultdict(list)
    for line in lines:
        for label, value in line.labels.items():
            by_kind[label, str(value)].append(line)
    values = Counter(label for label, _ in by_kind)
    groups = []
    for label, value in sorted(by_kind, key=lambda kind: (kind[0], _natural(kind[1]))):
        success = success_interval(by_kind[label, value])
        if success is not None and 1 < values[label] <= MAX_LABEL_VALUES:
            groups.append(Group(label=label, value=value, success=success))
    return groups


def _natural(value: str) -> tuple[int, float, str]:
    """Sort numbers by value, and before words."""
    return (0, float(value), value) if value.isdecimal() else (1, 0.0, value)


def _reward_terms(lines: Sequence[ResultLine]) -> dict[str, float]:
    totals: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        for step in line.reward_terms:
            for name, value in step.items():
                totals[name] += value
    return {name: totals[name] / len(lines) for name in sorted(totals)}


def _errors(lines: Sequence[ResultLine]) -> list[ErrorCount]:
    steps = Counter(code for line in lines for code in line.errors if code)
    episodes = Counter(code for line in lines for code in {c for c in line.errors if c})
    return [
        ErrorCount(code=code, num_steps=count, num_episodes=episodes[code])
        for code, count in sorted(steps.items(), key=lambda item: (-item[1], item[0]))
    ]


def _metrics(lines: Sequence[ResultLine]) -> dict[str, float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name, value in line.metrics.items():
            values[name].append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}
