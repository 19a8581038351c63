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


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([], "0 of 0 questions"),
        ([episode("a", right=True)], "1 of 1 questions have no episode of their twin: .'a'"),
        ([("a", {"f1": 1.0})], "unanswerable=True"),
    ],
)
def test_what_cannot_be_paired_is_named(episodes, message):
    with pytest.raises(DataError, match=message):
        musique_group_scores(episodes)
