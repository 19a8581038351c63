"""Agents that were trained several times: one row over all their seeds.

A trained agent's score is in doubt twice: its tasks are a sample, and so is its training. Agents
that differ in nothing but the seed of their training are several trainings of one agent.
"""

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from agent_envs.scoring.statistics import Interval, mean_interval
from agent_leaderboard.records.manifest import AgentRecord
from agent_leaderboard.report.summary import Board

SEED: Final = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One agent, trained with several seeds."""

    agents: tuple[str, ...]
    """Slugs of the single trainings."""
    success: dict[str, Interval]
    """By environment, over trainings: `count` is their number. Ends are within 0 and 1."""


def trained_agents(board: Board) -> list[Trained]:
    """Return the agents of a board that were trained with at least two seeds."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for agent in board.run.manifest.agents:
        if agent.train is not None:
            groups[_without_seed(agent)].append(agent.slug)
    return [_trained(board, tuple(slugs)) for slugs in groups.values() if len(slugs) > 1]


def _without_seed(agent: AgentRecord) -> str:
    settings = {key: value for key, value in (agent.train or {}).items() if key != SEED}
    same = dataclasses.replace(
        agent, slug="a", name="a", train=settings, weights_sha256={}, model=None, not_played=[]
    )
    return repr(same)


def _trained(board: Board, slugs: tuple[str, ...]) -> Trained:
    success = {}
    for environment in board.environments:
        cells = [board.cells.get((environment, slug)) for slug in slugs]
        means = [cell.success.mean for cell in cells if cell is not None and cell.success]
        if len(means) == len(slugs):
            over = mean_interval(means)
            success[environment] = dataclasses.replace(
                over, low=max(0.0, over.low), high=min(1.0, over.high)
            )
    return Trained(agents=slugs, success=success)
