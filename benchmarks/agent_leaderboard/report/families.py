"""How agents do on families of environments, on easy and hard tasks, and under attack."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import gymnasium as gym

from agent_envs.scoring.statistics import Interval, mean_of_shares, sign_test
from agent_leaderboard.records.manifest import EnvironmentRecord
from agent_leaderboard.report.summary import Board

DIFFICULTIES: Final = ("hops", "level")
"""The labels of tasks that say how hard they are."""
_IN_FAMILY: Final = "agent_envs.envs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Some of a board's tasks, and how often each agent solves them."""

    kind: str
    """``family``, or a label: ``hops``."""
    name: str
    num_environments: int
    success: dict[str, Interval]
    """Mean over the environments, by agent; agents that left one out are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacked:
    """One agent under one attack, beside the same tasks without it."""

    agent: str
    attack: str
    num_environments: int
    clean: float
    """Success without the attack, mean over environments."""
    attacked: float
    num_lost: int
    """Tasks solved without the attack only."""
    num_won: int
    """Tasks solved under the attack only."""
    p_value: float
    """Two-sided, of the exact sign test over these tasks."""
    obeyed: float | None
    """Share of episodes that did what planted text asked for; None where nothing asked."""


def family_of(record: EnvironmentRecord) -> str:
    """Return the family of an environment: the folder its class is in; ``other`` if unknown."""
    spec = gym.registry.get(record.id)
    entry = spec.entry_point if spec is not None else None
    if not isinstance(entry, str) or not entry.startswith(_IN_FAMILY):
        return "other"
    return entry.removeprefix(_IN_FAMILY).partition(".")[0]


def slices(board: Board) -> list[Slice]:
    """Return the families of a board, then its levels of difficulty, as far as there are several.

    Environments under attack are not among them.
    """
    shares: defaultdict[tuple[str, str], dict[str, dict[str, Interval]]] = defaultdict(dict)
    for record in board.run.manifest.environments:
        if record.attack_on is not None:
            continue
        for agent in board.agents:
            cell = board.cells.get((record.slug, agent))
            if cell is None or cell.success is None:
                continue
            place = shares["family", family_of(record)].setdefault(record.slug, {})
            place[agent] = cell.success
            for group in cell.groups:
                if group.label in DIFFICULTIES:
                    kind = shares[group.label, group.value]
                    kind.setdefault(record.slug, {})[agent] = group.success
    kinds = [kind for kind, _ in shares]
    return [
        Slice(
            kind=kind,
            name=name,
            num_environments=len(environments),
            success={
                agent: mean_of_shares([one[agent] for one in environments.values()])
                for agent in board.agents
                if all(agent in of_agent for of_agent in environments.values())
            },
        )
        for (kind, name), environments in sorted(
            shares.items(), key=lambda item: (["family", *DIFFICULTIES].index(item[0][0]), item[0])
        )
        if kinds.count(kind) > 1
    ]


def under_attack(board: Board) -> list[Attacked]:
    """Return how each agent does under each attack, on the environments that it played with it."""
    found = []
    by_attack: defaultdict[str, list[EnvironmentRecord]] = defaultdict(list)
    for record in board.run.manifest.environments:
        if record.attack_on is not None:
            by_attack[record.attack or "attack"].append(record)
    for agent in board.agents:
        for attack, records in by_attack.items():
            pairs = list(_pairs(board, agent, records))
            if pairs:
                found.append(_attacked(board, agent, attack, pairs))
    return found


_Pair = tuple[EnvironmentRecord, dict[int, float], dict[int, float]]


def _pairs(board: Board, agent: str, records: Sequence[EnvironmentRecord]) -> Iterator[_Pair]:
    """Yield environments with the scores of the tasks that were played with and without it."""
    for record in records:
        clean = board.run.task_scores(record.attack_on or "", agent)
        attacked = board.run.task_scores(record.slug, agent)
        shared = sorted(clean.keys() & attacked.keys())
        if shared:
            yield record, {t: clean[t] for t in shared}, {t: attacked[t] for t in shared}


def _attacked(board: Board, agent: str, attack: str, pairs: Sequence[_Pair]) -> Attacked:
    obeyed = [
        value
        for record, _, _ in pairs
        if (value := board.cells[record.slug, agent].metrics.get("obeyed_injection")) is not None
    ]
    changes = [after[t] - before[t] for _, before, after in pairs for t in before]
    num_lost, num_won = sum(c < 0 for c in changes), sum(c > 0 for c in changes)
    return Attacked(
        agent=agent,
        attack=attack,
        num_environments=len(pairs),
        clean=fmean(fmean(before.values()) for _, before, _ in pairs),
        attacked=fmean(fmean(after.values()) for _, _, after in pairs),
        num_lost=num_lost,
        num_won=num_won,
        p_value=sign_test(num_won, num_lost),
        obeyed=fmean(obeyed) if obeyed else None,
    )
