import pytest

from agent_envs import DataError
from agent_envs.scoring import musique_group_scores


def episode(task_id, *, right, f1=0.0, support=0.0):
    metrics = {"sufficiency": float(right), "f1": f1, "exact_match": float(f1 == 1.0)}
    return task_id, metrics | ({} if task_id.endswith("-unanswerable") else {"support_f1": support})


def test_a_pair_counts_only_where_both_members_are_told_apart():
    scores = musique_group_scores([
        episode("a", right=True, f1=0.5, support=1.0), episode("a-unanswerable", right=True),
        episode("b", right=True, f1=1.0, support=1.0), episode("b-unanswerable", right=False),
        episode("c", right=False, f1=1.0), episode("c-unanswerable", right=True),
        episode("d", right=True, f1=1.0, support=0.5), episode("d-unanswerable", right=True),
    ])  # fmt: skip
    # a earns 0.5, d 1; b and c nothing
    assert scores == {
        "group_answer_sufficiency_em": 0.25,
        "group_answer_sufficiency_f1": 0.375,
        "group_support_sufficiency_f1": 0.375,
    }
    repeated = [  # each episode of a member is paired with each of its twin
        episode("a", right=True, f1=1.0), episode("a", right=True, f1=0.0),
        episode("a-unanswerable", right=True), episode("a-unanswerable", right=False),
    ]  # fmt: skip
    assert musique_group_scores(repeated)["group_answer_sufficiency_f1"] == pytest.approx(0.25)


@pytest.mark.parametrize("episodes", [[], [episode("a", right=True)]])
def test_incomplete_pairs_are_refused(episodes):
    with pytest.raises(DataError, match="both members of each pair"):
        musique_group_scores(episodes)
