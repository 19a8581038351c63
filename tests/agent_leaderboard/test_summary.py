"""What is said of a run: cells, costs, breakdowns, ranks, and faults."""

from dataclasses import replace

import pytest

from agent_leaderboard.report.summary import counted, read_run, summarise
from agent_leaderboard.report.tables import make_markdown
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.played_runs import LICENSED, PUBLIC, make_run


def test_a_cell_holds_the_mean_with_its_interval(board):
    cell = board.cells[PUBLIC, "some"]
    assert cell.success.mean == 3 / 8
    assert cell.success.low < 3 / 8 < cell.success.high
    assert cell.num_episodes == cell.success.count == 8
    assert board.cells[PUBLIC, "oracle"].success.mean == 1.0
    assert board.cells[PUBLIC, "oracle"].success.low == pytest.approx(0.025 ** (1 / 8))
    assert board.elsewhere["oracle"].low <= board.overall["oracle"].low < 1
    assert board.overall["oracle"].mean == 1.0
    assert board.overall["some"].mean == (3 / 8 + 1) / 2


def test_agents_that_cannot_be_told_apart_are_tied(board):
    ranks = {agent: board.cells[PUBLIC, agent].rank for agent in board.agents}
    # best against hostile: 8 to 0, p = 2 / 256, times 2; best against some: 5 to 0, p = 0.06.
    # The oracle knows the answers and is not ranked.
    assert ranks == {"oracle": None, "best": 1, "some": 1, "hostile": 3}
    assert board.cells[PUBLIC, "some"].is_tied
    assert not board.cells[PUBLIC, "hostile"].is_tied


def test_costs_are_means_over_episodes(board):
    cost = board.cells[PUBLIC, "some"].cost
    lines = board.run.lines[PUBLIC, "some"]
    steps = sum(len(line.actions) for line in lines) / 8
    assert (cost.calls, cost.tokens) == (steps, pytest.approx(110 * steps))
    assert cost.money == pytest.approx(steps * (100 * 1 + 10 * 2) / 1e6)
    assert cost.seconds == pytest.approx(0.25 + 3.5 / 8)
    assert board.cells[PUBLIC, "oracle"].cost.money is None


def test_scores_are_broken_down_by_kind_of_task(board):
    groups = {(g.label, g.value): g.success for g in board.cells[PUBLIC, "some"].groups}
    assert list(groups) == [("hops", "2"), ("hops", "3"), ("hops", "4"), ("type", "even"),
                            ("type", "odd")]  # fmt: skip
    assert (groups["type", "even"].mean, groups["type", "even"].count) == (0.5, 4)


def test_mistakes_and_reward_terms_are_counted(board):
    cell = board.cells[PUBLIC, "some"]
    (error,) = cell.errors
    assert (error.code, error.num_steps, error.num_episodes) == ("no_action", 5, 5)
    assert cell.reward_terms["exact_match"] == 3 / 8
    assert cell.stop_reasons == {"answered": 8}


def test_faults_beyond_the_stated_share_are_failures(tmp_path, data_folder):
    folder = make_run(tmp_path / "run", data_folder, faults=[(PUBLIC, "some", 3)])
    board = summarise(read_run(folder))
    cell = board.cells[PUBLIC, "some"]
    # one of 8 is more than 2 %
    assert (cell.num_faults, cell.num_episodes) == (1, 8)
    assert cell.success.mean == 3 / 8
    assert cell.stop_reasons["timeout"] == 1
    assert "(1 faults)" in make_markdown(board)


def test_a_few_faults_are_left_out(board):
    line = board.run.lines[PUBLIC, "some"][0]
    lines = [replace(line, task=task, success=task < 49) for task in range(100)]
    fault = replace(line, success=False, error="OSError", stop_reason=StopReason.POLICY_ERROR)
    few = [*lines[:98], replace(fault, task=98), replace(fault, task=99)]
    many = [*lines[:97], *(replace(fault, task=task) for task in range(97, 100))]
    assert (len(counted(few)), len(counted(many))) == (98, 100)


def test_faults_everywhere_are_no_way_to_the_first_rank(tmp_path, data_folder):
    faults = [(PUBLIC, "some", task) for task in range(1, 8)]
    board = summarise(read_run(make_run(tmp_path / "run", data_folder, faults=faults)))
    cell = board.cells[PUBLIC, "some"]
    assert (cell.success.mean, cell.num_faults) == (1 / 8, 7)
    assert board.overall["some"].mean == pytest.approx((1 / 8 + 1) / 2)


def test_scores_that_are_not_the_published_measure_are_marked(board):
    assert board.marks[PUBLIC] == " (own measure)"
    assert board.marks[LICENSED] == " (own data: only who holds them can check)"
    assert f"`{LICENSED}`{board.marks[LICENSED]}" in make_markdown(board)


def test_samples_give_pass_at_k_and_pass_hat_k(board):
    lines = board.run.lines[LICENSED, "oracle"]
    # Task 0: right, wrong, right, wrong. Task 1: all right.
    samples = [
        replace(line, sample=sample, success=line.task == 1 or sample % 2 == 0)
        for line in lines
        for sample in range(4)
    ]
    run = replace(board.run, lines={**board.run.lines, (LICENSED, "oracle"): samples})
    cell = summarise(run).cells[LICENSED, "oracle"]
    assert cell.success.mean == 0.75
    assert cell.success.count == 2
    # 1 - C(2,2)/C(4,2) = 5/6 and C(2,2)/C(4,2) = 1/6
    assert cell.pass_at == pytest.approx({1: 0.75, 2: (5 / 6 + 1) / 2, 4: 1.0})
    assert cell.pass_hat == pytest.approx({1: 0.75, 2: (1 / 6 + 1) / 2, 4: 0.5})


def test_a_cell_does_not_depend_on_who_else_plays(board):
    manifest = replace(board.run.manifest, agents=board.run.manifest.agents[2:3])
    alone = summarise(replace(board.run, manifest=manifest)).cells[PUBLIC, "some"]
    assert alone.success == board.cells[PUBLIC, "some"].success
    assert alone.groups == board.cells[PUBLIC, "some"].groups


def test_every_two_agents_are_compared(board):
    comparisons = board.comparisons()
    assert len(comparisons) == 2 * 6
    comparison, p_holm = comparisons[PUBLIC, "oracle", "some"]
    assert (comparison.num_better, comparison.num_worse, comparison.num_equal) == (5, 0, 3)
    assert comparison.p_value == 2 / 32
    # 6 pairs: oracle and best against hostile have 2 / 256 each, then 2 / 32 three times
    assert p_holm == 4 * 2 / 32
