import numpy as np
import pytest

from agent_envs.errors import ConfigurationError, UnknownNameError
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS, BRANCHING
from benchmarks.credit.rows import Row, all_estimators, estimates_of, rows_of
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode
from tests.benchmarks.credit.test_scores import COSTS


def episode(**changes):
    settings = {"group_id": "g", "rewards": [0.0, 1.0], "lengths": [2, 3], "anchors": ["x", "y"],
                "values": [[0.5, 0.5], [0.75, 0.5, 0.25]], "advantages": [0.25, 0.5],
                "standard_errors": [0.1, 0.1], "halves": [[0.25, 0.5]] * 2}  # fmt: skip
    return CreditEpisode(**(settings | changes))


def batch(*episodes):
    return CreditBatch(
        environment="e", stage="s", seed=1, success=0.5, reliability=1.0,
        reliability_by_variance=1.0, costs=COSTS, episodes=list(episodes),
    )  # fmt: skip


BATCH = batch(episode(), episode(rewards=[0.0, 0.0], anchors=["x", "z"]))


def test_every_estimator_of_the_package_says_something_of_every_step():
    rows = rows_of(all_estimators())
    assert {row.estimator for row in rows} == set(ADVANTAGE_ESTIMATORS)
    for row in rows:
        estimates = estimates_of(row, BATCH)
        assert [len(e) for e in estimates] == [2, 2], row.name
        assert all(np.isfinite(e).all() for e in estimates), row.name


def test_estimators_with_values_are_scored_with_a_critic_and_without():
    names = [row.name for row in rows_of(["gae_step", "grpo"])]
    assert names == ["gae_step, no critic", "gae_step, critic", "gae_step, critic, lam 0.9", "grpo"]
    # without whitening: return 1 less V(x) = 0.5 and V(y) = 0.75; without a critic 1 and 1
    options = {"whiten": False}
    with_critic = estimates_of(Row("r", "gae_step", "critic", options), BATCH)
    without = estimates_of(Row("r", "gae_step", "no critic", options), BATCH)
    assert with_critic[0].tolist() == [0.5, 0.25]
    assert without[0].tolist() == [1.0, 1.0]


def test_a_row_that_needs_values_says_nothing_where_there_are_none():
    bare = batch(episode(values=[]))
    assert estimates_of(Row("r", "gae_step", "critic"), bare) is None
    assert estimates_of(Row("r", "gae_step", "no critic"), bare) is not None


def test_what_is_said_of_tokens_is_averaged_over_the_step():
    # token advantages at lambda 1: return 1 less the values (0.5 0.5 | 0.75 0.5 0.25)
    row = Row("r", "gae_token", "critic", {"whiten": False})
    assert estimates_of(row, BATCH)[0].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("estimator", sorted(BRANCHING))
def test_branches_are_seen_by_those_that_take_them_and_are_not_scored(estimator):
    # from y on, another one gets nothing: V(y) is 1/2, and the last step is worth 1/2 or -1/2
    branch = episode(rewards=[0.0, 0.0], start=1, advantages=[], standard_errors=[], halves=[])
    seen, unseen = batch(*BATCH.episodes, branch), BATCH
    row = Row(estimator, estimator)
    with_branch, without = estimates_of(row, seen), estimates_of(row, unseen)
    assert len(with_branch) == len(without) == 2
    assert not np.allclose(with_branch[0], without[0])
    grpo = Row("grpo", "grpo")
    assert np.allclose(estimates_of(grpo, seen), estimates_of(grpo, unseen))


def test_anybodys_estimator_is_scored(tmp_path, monkeypatch):
    (tmp_path / "mine_credit.py").write_text(
        "def last_only(episodes, *, weight=2.0):\n"
        "    return [[0.0] * (len(e.rewards) - 1) + [weight * e.rewards[-1]] for e in episodes]\n"
        "def too_long(episodes):\n"
        "    return [[0.0] * 9 for _ in episodes]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = rows_of(["mine_credit:last_only"])
    assert [e.tolist() for e in estimates_of(row, BATCH)] == [[0.0, 2.0], [0.0, 0.0]]
    (row,) = rows_of(["mine_credit:too_long"])
    with pytest.raises(ConfigurationError, match="9 advantages for an episode of 2 steps and 5"):
        estimates_of(row, BATCH)
    with pytest.raises(UnknownNameError, match="gigpo"):
        rows_of(["gigpa"])
