"""Ranks with ties."""

from hypothesis import given
from hypothesis import strategies as st

from agent_leaderboard.report.uncertainty import fill_unscored, mean_by_task, ranks_with_ties


def scores(*values):
    return dict(enumerate(map(float, values)))


def test_samples_of_one_task_do_not_count_as_more_tasks():
    once = [(task, float(task < 10)) for task in range(20)]
    assert mean_by_task(once * 8) == mean_by_task(once)
    assert mean_by_task([(4, 1.0), (2, 0.0), (4, 0.0)]) == {2: 0.0, 4: 0.5}


def test_a_better_score_never_has_a_worse_rank():
    agents = {
        "L": {t: float(t < 60) for t in range(100)},
        "A": {t: float(t < 50) for t in range(100)},
        "B": {t: float(t < 30 or t >= 82) for t in range(100)},
    }
    assert ranks_with_ties(agents) == {"L": 1, "A": 2, "B": 2}


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


def test_an_agent_that_lacks_tasks_scores_0_on_them():
    good = {t: float(t < 60) for t in range(100)}
    ranks = ranks_with_ties({"good": good, "bad": dict.fromkeys(range(100), 0.0), "one": {0: 1.0}})
    assert ranks == {"good": 1, "bad": 2, "one": 2}
    assert len(fill_unscored(dict.fromkeys(range(98), 1.0), range(100))) == 98
    assert fill_unscored(dict.fromkeys(range(97), 1.0), range(100))[99] == 0.0


def test_agents_without_a_significant_difference_share_a_rank():
    agents = {
        "good": scores(*[1] * 38 + [0] * 2),
        "as good": scores(*[1] * 36 + [0] * 4),
        "bad": scores(*[1] * 10 + [0] * 30),
        "none": scores(*[0] * 40),
    }
    # good against as good: 2 to 0, p = 0.5; against bad: 28 to 0; bad against none: 10 to 0
    assert ranks_with_ties(agents) == {"good": 1, "as good": 1, "bad": 3, "none": 4}


def test_more_comparisons_need_more_evidence():
    # 6 to 0 has p = 0.031: enough for one comparison with the leader, not for one of two
    pair = {"a": scores(*[1] * 6), "b": scores(*[0] * 6)}
    assert ranks_with_ties(pair) == {"a": 1, "b": 2}
    assert set(ranks_with_ties(pair | {"c": scores(*[1] * 3 + [0] * 3)}).values()) == {1}


def test_the_best_of_the_remaining_agents_leads_the_next_group():
    # b loses to a by 12 to 0, c to b by 2 to 0: b leads the second group, and c shares its rank.
    agents = {
        "c": scores(*[1] * 26 + [0] * 14),
        "a": scores(*[1] * 40),
        "b": scores(*[1] * 28 + [0] * 12),
    }
    assert ranks_with_ties(agents) == {"c": 2, "a": 1, "b": 2}


def test_one_task_ranks_no_agent():
    assert ranks_with_ties({"a": scores(1), "b": scores(0)}) == {"a": 1, "b": 1}
    assert ranks_with_ties({"alone": scores(1)}) == {"alone": 1}
