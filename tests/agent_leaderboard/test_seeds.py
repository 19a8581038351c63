"""Agents that were trained with several seeds: one row over their trainings."""

import dataclasses

import pytest

from agent_leaderboard.report.seeds import trained_agents
from agent_leaderboard.report.summary import PlayedRun, read_run, summarise
from agent_leaderboard.report.tables import TABLE, make_reports
from tests.agent_leaderboard.played_runs import LICENSED, PUBLIC

TRAIN = {"learning_rate": 1e-4}


@pytest.fixture(scope="module")
def played(run_folder):
    return read_run(run_folder)


def trained(played, solved, **trains):
    """A board of agents that solve the first so many of the 8 public tasks each, with `trains`."""
    model = played.manifest.agent("best")
    agents, lines = [], {}
    for slug, train in trains.items():
        agents.append(dataclasses.replace(model, slug=slug, name=slug, kind="checkpoint",
                                          train=train, weights_sha256={"w": slug}))  # fmt: skip
        for environment in (PUBLIC, LICENSED):
            lines[environment, slug] = [
                dataclasses.replace(line, agent=slug, success=line.task < solved[slug])
                for line in played.lines[environment, "best"]
            ]
    manifest = dataclasses.replace(played.manifest, agents=agents)
    return summarise(PlayedRun(manifest=manifest, lines=lines, seconds={}))


SEEDS = {f"s{seed}": TRAIN | {"seed": seed} for seed in (0, 1, 2)}


def test_the_interval_is_students_over_trainings(played):
    (one,) = trained_agents(trained(played, {"s0": 4, "s1": 5, "s2": 4}, **SEEDS))
    assert one.agents == ("s0", "s1", "s2")
    # Means 1/2, 5/8 and 1/2: mean 13/24, standard deviation sqrt(1/192); Student's t at 97.5 % with
    # 2 degrees of freedom is 4.3027, so 4.3027 * sqrt(1/192) / sqrt(3) = 0.17928 to either side.
    success = one.success[PUBLIC]
    assert (success.mean, success.low, success.high) == pytest.approx(
        (13 / 24, 13 / 24 - 0.17928, 13 / 24 + 0.17928), abs=1e-5
    )
    assert success.count == 3


def test_its_ends_stay_within_0_and_1(played):
    (one,) = trained_agents(trained(played, {"s0": 8, "s1": 3, "s2": 8}, **SEEDS))
    assert (one.success[PUBLIC].low, one.success[PUBLIC].high) == (0.0, 1.0)


def test_only_what_differs_in_the_seed_alone_is_one_agent(played):
    others = {"warmer": {"learning_rate": 1e-3, "seed": 1}, "as it is": None, "too": None}
    solved = dict.fromkeys([*SEEDS, *others], 4)
    (one,) = trained_agents(trained(played, solved, **SEEDS, **others))
    assert one.agents == ("s0", "s1", "s2")
    assert trained_agents(trained(played, solved, s0=SEEDS["s0"], **others)) == []


def test_an_environment_that_one_training_did_not_play_has_no_row(played):
    board = trained(played, dict.fromkeys(SEEDS, 4), **SEEDS)
    cells = {key: cell for key, cell in board.cells.items() if key != (LICENSED, "s1")}
    (one,) = trained_agents(dataclasses.replace(board, cells=cells))
    assert set(one.success) == {PUBLIC}


def test_the_page_has_a_table_over_seeds(played):
    board = trained(played, {"s0": 4, "s1": 5, "s2": 4}, **SEEDS)
    text = make_reports(board, [TABLE], None)[TABLE]
    assert "54.2 [36.2, 72.1]" in text
