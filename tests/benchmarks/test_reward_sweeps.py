import pytest

from benchmarks.pareto import draw, front
from benchmarks.reward_model import quarters


@pytest.mark.parametrize(("points", "best"), [
    ({"a": (1.0, 3.0), "b": (0.5, 1.0), "c": (0.5, 2.0), "d": (0.0, 0.0)}, {"a", "b", "d"}),
    ({"a": (0.5, 1.0), "b": (0.5, 1.0)}, {"a", "b"}),  # equal ones do not beat each other
    ({"a": (0.5, 1.0), "b": (0.6, 1.0)}, {"b"}),
])  # fmt: skip
def test_the_front_has_the_policies_that_no_other_beats(points, best, tmp_path):
    results = {name: {"success": s, "calls": c} for name, (s, c) in points.items()}
    assert front(results) == best
    draw(tmp_path / "pareto.png", results, best)
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")


def test_quarters_of_a_run_have_mean_true_and_modelled_rewards():
    curve = [(step, step / 10, 1 - step / 10) for step in range(8)]
    # the first quarter has the steps 0 and 1, the last 6 and 7
    assert quarters(curve)[0] == pytest.approx((0.05, 0.95))
    assert quarters(curve)[3] == pytest.approx((0.65, 0.35))
