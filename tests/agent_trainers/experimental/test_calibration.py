import numpy as np
import pytest

from agent_trainers.experimental.values.reliability import fit_line, reliability


def test_the_calibration_error_is_the_distance_of_bins_from_what_came_true():
    # ten bins of equal weight: what is given 0.2 comes true in 0.5 of the cases, 0.8 in 0.9
    predicted = [0.2] * 5 + [0.8] * 5
    observed = [0.5] * 5 + [0.9] * 5
    found = reliability(predicted, observed, [3.0] * 10)
    assert found.calibration_error == pytest.approx((0.3 + 0.1) / 2)
    assert found.mean_squared_error == pytest.approx((0.09 + 0.01) / 2)
    assert found.mean_squared_error_of_mean == pytest.approx(0.04)
    assert found.correlation == pytest.approx(1.0)


def test_errors_of_both_signs_within_a_bin_cancel_and_weights_count():
    found = reliability([0.5, 0.5], [0.0, 1.0], [1.0, 3.0])
    # the bins hold one prediction each, or both; by weight it is 1/4 * 0.5 + 3/4 * 0.5 apart
    assert sum(b.weight for b in found.bins) == 4.0
    assert found.mean_squared_error == pytest.approx(0.25)
    assert found.mean_squared_error_of_mean == pytest.approx(0.75 * 0.25)
    assert np.isnan(found.correlation)


def test_the_noise_of_what_came_true_says_what_a_perfect_prediction_would_have():
    # of a variance of 0.25 a quarter is noise: the rest is what can be known
    found = reliability([0.4, 0.6], [0.0, 1.0], [2.0, 2.0], noise=0.0625)
    assert found.least_squared_error == 0.0625
    assert found.best_correlation == pytest.approx(0.75**0.5)
    unknown = reliability([0.4, 0.6], [0.0, 1.0], [2.0, 2.0])
    assert np.isnan([unknown.least_squared_error, unknown.best_correlation]).all()


def test_predictions_that_are_right_on_average_have_a_small_error():
    rng = np.random.default_rng(0)
    chances = rng.random(20_000)
    came_true = (rng.random(20_000) < chances).astype(float)
    found = reliability(chances, came_true, np.ones(20_000))
    assert found.calibration_error < 0.02
    assert found.mean_squared_error == pytest.approx(1 / 6, abs=0.01)  # E[p * (1 - p)]
    assert len(found.bins) == 10


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="no predictions"):
        reliability([], [], [])


@pytest.mark.parametrize(
    ("observed", "line"),
    [
        ([1.0, 3.0, 5.0], (2.0, 1.0)),
        ([4.0, 4.0, 4.0], (1.0, 3.0)),  # nothing to learn a slope from: the mean alone
        ([5.0, 3.0, 1.0], (1.0, 2.0)),  # it would turn the order round
    ],
)
def test_a_line_sets_slope_and_mean_right(observed, line):
    assert fit_line([0.0, 1.0, 2.0], observed, [1.0] * 3) == pytest.approx(line)
