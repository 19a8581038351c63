"""Statistics of a run: cells, costs, breakdowns, ranks, failures, trainings and attacks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.errors import UnknownNameError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    comparisons,
    counted,
    fill_unscored,
    ranks_with_ties,
    summarise,
    under_attack,
)
from agent_leaderboard.report.tables import make_markdown
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.runs import LICENSED, PUBLIC, make_run, write_config


def test_a_cell_has_the_mean_with_its_interval(board):
    cell = board.cells[PUBLIC, "some"]
    assert cell["success"].mean == 3 / 8
    assert cell["success"].low < 3 / 8 < cell["success"].high
    assert cell["num_episodes"] == cell["success"].count == 8
    assert board.cells[PUBLIC, "oracle"]["success"].mean == 1.0
    assert board.cells[PUBLIC, "oracle"]["success"].low == pytest.approx(0.025 ** (1 / 8))
    assert board.elsewhere["oracle"].low <= board.overall["oracle"].low < 1
    assert board.overall["oracle"].mean == 1.0
    assert board.overall["some"].mean == (3 / 8 + 1) / 2


def test_agents_without_a_significant_difference_are_tied(board):
    ranks = {agent: board.cells[PUBLIC, agent]["rank"] for agent in board.agents}
    # best against hostile: 8 to 0, p = 2 / 256, times 2; best against some: 5 to 0, p = 0.06.
    # The oracle knows the answers and is not ranked.
    assert ranks == {"oracle": None, "best": 1, "some": 1, "hostile": 3}
    assert board.cells[PUBLIC, "some"]["is_tied"]
    assert not board.cells[PUBLIC, "hostile"]["is_tied"]


def test_costs_are_means_over_episodes(board):
    cost = board.cells[PUBLIC, "some"]
    results = board.run.results[PUBLIC, "some"]
    steps = sum(len(one.actions) for one in results) / 8
    assert (cost["calls"], cost["tokens"]) == (steps, pytest.approx(110 * steps))
    assert cost["money"] == pytest.approx(steps * (100 * 1 + 10 * 2) / 1e6)
    assert cost["seconds"] == pytest.approx(0.25 + 3.5 / 8)
    assert board.cells[PUBLIC, "oracle"]["money"] is None


def test_scores_errors_and_terms_are_broken_down(board):
    cell = board.cells[PUBLIC, "some"]
    groups = {(label, value): success for label, value, success in cell["groups"]}
    assert list(groups) == [("hops", "2"), ("hops", "3"), ("hops", "4"), ("type", "even"),
                            ("type", "odd")]  # fmt: skip
    assert (groups["type", "even"].mean, groups["type", "even"].count) == (0.5, 4)
    assert cell["errors"] == {"no_action": (5, 5)}
    assert cell["reward_terms"]["exact_match"] == 3 / 8
    assert cell["stop_reasons"] == {"answered": 8}


def test_failures_beyond_the_limit_count_as_failures(tmp_path, data_folder):
    faults = [(PUBLIC, "some", task) for task in range(1, 8)]
    board = summarise(read_run(make_run(tmp_path / "run", data_folder, faults=faults)))
    cell = board.cells[PUBLIC, "some"]
    assert (cell["success"].mean, cell["num_faults"], cell["num_episodes"]) == (1 / 8, 7, 8)
    assert cell["stop_reasons"]["timeout"] == 7
    assert board.overall["some"].mean == pytest.approx((1 / 8 + 1) / 2)
    text = make_markdown(board)
    assert "(7 failures)" in text
    assert f"`{LICENSED}` (own data: only who holds them can check)" in text


def test_a_few_failures_are_left_out(board):
    one = board.run.results[PUBLIC, "some"][0]
    results = [replace(one, task=task, success=task < 49) for task in range(100)]
    fault = replace(one, success=False, error="OSError", stop_reason=StopReason.POLICY_ERROR)
    few = [*results[:98], replace(fault, task=98), replace(fault, task=99)]
    many = [*results[:97], *(replace(fault, task=task) for task in range(97, 100))]
    assert (len(counted(few)), len(counted(many))) == (98, 100)


def test_samples_give_pass_at_k_and_pass_hat_k(board):
    # Task 0: right, wrong, right, wrong. Task 1: all right.
    samples = [
        replace(one, sample=sample, success=one.task == 1 or sample % 2 == 0)
        for one in board.run.results[LICENSED, "oracle"]
        for sample in range(4)
    ]
    run = replace(board.run, results={**board.run.results, (LICENSED, "oracle"): samples})
    cell = summarise(run).cells[LICENSED, "oracle"]
    assert (cell["success"].mean, cell["success"].count) == (0.75, 2)
    # 1 - C(2,2)/C(4,2) = 5/6 and C(2,2)/C(4,2) = 1/6
    assert cell["pass_at"] == pytest.approx({1: 0.75, 2: (5 / 6 + 1) / 2, 4: 1.0})
    assert cell["pass_hat"] == pytest.approx({1: 0.75, 2: (1 / 6 + 1) / 2, 4: 0.5})


def test_all_pairs_of_agents_are_compared(board):
    found = comparisons(board, PUBLIC)
    assert len(found) == 6
    comparison, p_holm = found["oracle", "some"]
    assert (comparison.num_better, comparison.num_worse, comparison.num_equal) == (5, 0, 3)
    assert comparison.p_value == 2 / 32
    # 6 pairs: oracle and best against hostile have 2 / 256 each, then 2 / 32 three times
    assert p_holm == 4 * 2 / 32


# Ranks


def scores(*values):
    return dict(enumerate(map(float, values)))


@given(
    solved=st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12), min_size=1, max_size=6)
)
def test_ranks_agree_with_scores_and_equal_scores_share_a_rank(solved):
    agents = {str(i): scores(*own) for i, own in enumerate(solved)}
    ranks = ranks_with_ties(agents)
    means = {agent: sum(own.values()) for agent, own in agents.items()}
    for one in agents:
        for other in agents:
            assert means[one] <= means[other] or ranks[one] <= ranks[other]
            assert means[one] != means[other] or ranks[one] == ranks[other]


@pytest.mark.parametrize(
    ("agents", "expected"),
    [
        # good against as good: 2 to 0, p = 0.5; against bad: 28 to 0; bad against none: 10 to 0
        (
            {"good": scores(*[1] * 38 + [0] * 2), "as good": scores(*[1] * 36 + [0] * 4),
             "bad": scores(*[1] * 10 + [0] * 30), "none": scores(*[0] * 40)},
            {"good": 1, "as good": 1, "bad": 3, "none": 4},
        ),
        # b loses to a by 12 to 0, c to b by 2 to 0: b leads the second group, c shares its rank
        (
            {"c": scores(*[1] * 26 + [0] * 14), "a": scores(*[1] * 40),
             "b": scores(*[1] * 28 + [0] * 12)},
            {"c": 2, "a": 1, "b": 2},
        ),
        # B is not better than A, though it differs less from the leader
        (
            {"L": scores(*(t < 60 for t in range(100))), "A": scores(*(t < 50 for t in range(100))),
             "B": scores(*(t < 30 or t >= 82 for t in range(100)))},
            {"L": 1, "A": 2, "B": 2},
        ),
        # 6 to 0 has p = 0.031: enough for one comparison with the leader, not for one of two
        ({"a": scores(*[1] * 6), "b": scores(*[0] * 6)}, {"a": 1, "b": 2}),
        (
            {"a": scores(*[1] * 6), "b": scores(*[0] * 6), "c": scores(*[1] * 3 + [0] * 3)},
            {"a": 1, "b": 1, "c": 1},
        ),
        # an agent that lacks tasks scores 0 on them
        (
            {"good": scores(*(t < 60 for t in range(100))), "bad": scores(*[0] * 100),
             "one": {0: 1.0}},
            {"good": 1, "bad": 2, "one": 2},
        ),
        ({"a": scores(1), "b": scores(0)}, {"a": 1, "b": 1}),
    ],
)  # fmt: skip
def test_ranks_with_ties(agents, expected):
    assert ranks_with_ties(agents) == expected


def test_a_few_missing_tasks_are_left_out_and_more_score_0():
    assert len(fill_unscored(dict.fromkeys(range(98), 1.0), range(100))) == 98
    assert fill_unscored(dict.fromkeys(range(97), 1.0), range(100))[99] == 0.0


# Attacks

ATTACKED = """
environments:
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops, kwargs: {hops: [1, 2, 3]}, tasks: 12,
     contamination: none}
  - {id: AgentR1/SyntheticTable-v0, name: table, tasks: 4, contamination: none}
  - {id: AgentR1/CommandLine-v0, name: shell, kwargs: {split: test}, tasks: 2, contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops edited, tasks: 12, attack: edits, attack_on: hops,
     kwargs: {hops: [1, 2, 3], attack: {attacker: swap, budget: 4}}, contamination: none}
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops injected, tasks: 12, attack: injection,
     attack_on: hops, kwargs: {hops: [1, 2, 3], variant: injected}, contamination: none}
agents:
  - {name: reader, kind: "tests.agent_leaderboard.outside.acting:reader"}
  - {name: random, kind: random}
  - {name: oracle, kind: oracle}
"""


def test_an_attack_changes_what_an_agent_reads_and_counts_in_no_mean(tmp_path):
    config = load_configs([write_config(tmp_path, ATTACKED)])
    attacked_board = summarise(read_run(run(config, tmp_path / "run")))
    found = {(one["agent"], one["attack"]): one for one in under_attack(attacked_board)}
    reader = found["reader", "edits"]
    assert reader["clean"] == 1.0
    assert reader["attacked"] < 0.75  # it believes what it reads
    lost = round(12 * (1 - reader["attacked"]))
    assert (reader["num_lost"], reader["num_won"], reader["obeyed"]) == (lost, 0, None)
    assert reader["p_value"] == pytest.approx(2 * 0.5**lost)
    oracle = found["oracle", "edits"]
    assert (oracle["clean"], oracle["attacked"], oracle["num_lost"]) == (1.0, 1.0, 0)
    assert found["reader", "injection"]["obeyed"] is not None
    assert found["oracle", "injection"]["obeyed"] == 0.0
    clean = [attacked_board.cells[e, "random"]["success"].mean for e in ("hops", "table", "shell")]
    assert attacked_board.overall["random"].mean == pytest.approx(sum(clean) / 3)


def test_an_attack_on_an_unknown_environment_is_named(tmp_path):
    text = ATTACKED.replace("attack_on: hops,", "attack_on: hop,", 1)
    with pytest.raises(UnknownNameError, match="Did you mean 'hops'"):
        load_configs([write_config(tmp_path, text)])
