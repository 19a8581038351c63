import pytest

from agent_envs.scoring import drop_interval, wilson_interval


def test_wilsons_interval_is_that_of_the_literature():
    # 10 of 100: 0.0552 to 0.1744 (Newcombe, 1998); 0 of 100: 0 to z**2 / (n + z**2) = 0.0370
    assert wilson_interval(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson_interval(0.0, 100) == pytest.approx((0.0, 0.0370), abs=1e-4)
    assert wilson_interval(1.0, 100)[1] == 1.0


def test_the_interval_of_a_difference_is_newcombes():
    # 56 of 70 less 48 of 80: 0.2, 0.0524 to 0.3339 (Newcombe, 1998, table II, method 10)
    before = (56 / 70, *wilson_interval(56 / 70, 70))
    after = (48 / 80, *wilson_interval(48 / 80, 80))
    assert drop_interval(before, after) == pytest.approx((0.0524, 0.3339), abs=1e-4)
