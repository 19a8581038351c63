"""Statistics of a run: cells, costs, breakdowns, ranks, failures, trainings and attacks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.errors import UnknownNameError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import published
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import (
    comparisons,
    counted,
    measure_mark,
    on_trust,
    rank,
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
    assert board.overall["oracle"].mean == 1.0
    assert board.overall["some"].mean == (3 / 8 + 1) / 2


def test_agents_without_a_significant_difference_are_tied(board):
    ranks = {agent: board.cells[PUBLIC, agent]["rank"] for agent in board.agents}
    # Of 8 tasks: 8 are [63.1, 100.0], 3 are [8.5, 75.5], none are [0.0, 36.9].
    # The oracle knows the answers and is not ranked.
    assert ranks == {"oracle": None, "best": 1, "some": 1, "hostile": 2}
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


def test_data_of_a_package_are_not_called_own_data():
    board = published()
    (bfcl,) = (one for one in board.environments if one.slug == "bfcl")
    (other, *_) = (replace(file, sha256="0" * 64) for file in bfcl.data)
    assert measure_mark(board, replace(bfcl, data=[other])) == " (own measure)"
    assert "own data" in measure_mark(board, replace(bfcl, data=[replace(other, name="a.json")]))


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


MEANS = st.dictionaries(st.text(max_size=2), st.integers(0, 40).map(lambda n: n / 40), min_size=1)


@given(means=MEANS, other=st.integers(0, 40))
def test_no_name_and_no_agent_that_is_not_better_changes_a_rank(means, other):
    ranks = rank(means, 40)
    for one, first in means.items():
        for another, second in means.items():
            assert first <= second or ranks[one] <= ranks[another]
            assert first != second or ranks[one] == ranks[another]
    renamed = rank({f"{name}*": mean for name, mean in reversed(means.items())}, 40)
    assert renamed == {f"{name}*": place for name, place in ranks.items()}
    more = rank({**means, "third": other / 40}, 40)
    assert all(more[name] == ranks[name] for name, mean in means.items() if mean >= other / 40)


def test_copies_of_the_runner_up_do_not_reach_the_leader():
    # Of 100 tasks, 50 are [39.8, 60.2] and 28 are [19.5, 37.9].
    copies = {f"copy {i}": 0.28 for i in range(50)}
    ranks = rank({"leader": 0.5, "runner-up": 0.28, "last": 0.05, **copies}, 100)
    assert (ranks["leader"], ranks["runner-up"], ranks["copy 7"]) == (1, 2, 2)
    assert ranks["last"] == 53


def test_overlapping_intervals_share_a_rank():
    # Of 100 tasks: 60 are [49.7, 69.7], 45 are [35.0, 55.3], 30 are [21.2, 40.0].
    assert rank({"a": 0.6, "b": 0.45, "c": 0.3}, 100) == {"a": 1, "b": 1, "c": 2}
    assert rank({"a": 1.0, "b": 0.0}, 1) == {"a": 1, "b": 1}


def test_rows_are_best_first_and_upper_bounds_last(board):
    assert [agent.slug for agent in board.rows] == ["best", "some", "hostile", "oracle"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kind": "random", "model": None}, ""),
        ({"kind": "checkpoint", "model": "tiny_policy"}, ""),
        (
            {
                "kind": "checkpoint",
                "model": "mine",
                "train": {"num_eval_tasks": 0},
                "weights_sha256": {"model.safetensors": "0"},
            },
            "author of the actions",
        ),
        (
            {"kind": "naive_rag", "model": "mine", "train": {"num_eval_tasks": 0}},
            "author of the actions, costs (not recounted)",
        ),
        ({"kind": "react", "model": "a/b"}, "author of the actions, costs (not recounted)"),
        ({"kind": "mine:Agent", "model": "tiny_policy"}, "own code, costs (not recounted)"),
    ],
)
def test_what_rests_on_trust_follows_from_kind_and_model(board, changes, expected):
    agent = replace(board.run.manifest.agents[1], **changes)
    assert on_trust(agent) == expected


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
