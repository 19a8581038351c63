"""Forgeries of every kind are found; true runs raise no alarm."""

import pytest

from agent_leaderboard.verify.verify import check_run
from benchmarks.forgeries import KINDS, TRUE_RUNS, make_run, plant_many


@pytest.fixture(scope="module")
def true_run(tmp_path_factory, small_data):
    return make_run(tmp_path_factory.mktemp("true"), small_data, "hotpot.jsonl", **TRUE_RUNS[2])


def test_a_true_run_raises_no_alarm_and_names_what_stays_on_trust(true_run, small_data):
    found = check_run(true_run, small_data)
    assert found.problems == []
    assert found.is_whole
    names = [text.partition(":")[0] for text in found.on_trust]
    assert names == ["small", "voting", "leaderboard.html"]


def test_forgeries_of_every_kind_are_found(true_run, small_data, tmp_path):
    planted = plant_many([true_run], len(KINDS), tmp_path / "forged", small_data)
    missed = [
        (kind, seed) for kind, seed, folder in planted if not check_run(folder, small_data).problems
    ]
    assert len(KINDS) >= 12
    assert missed == []
