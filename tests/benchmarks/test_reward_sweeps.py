import pytest

from benchmarks import reward_model, roles, summaries
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


@pytest.mark.parametrize(("command", "seeds"), [
    (reward_model, [1, 1]), (summaries, [1, 1]), (roles, [1, 1]), (roles, range(17)),
])  # fmt: skip
def test_seeds_that_are_not_independent_or_too_many_are_refused(command, seeds, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--work", str(tmp_path / "work"), "--seeds", *map(str, seeds)])
    assert "--seeds: " in capsys.readouterr().err
    assert not (tmp_path / "work").exists()


def test_a_reward_model_of_another_run_judges_again(tmp_path, monkeypatch):
    computed = []

    def train(grid, key, spec, options):
        computed.append(key)
        return {"curve": [(step, 0.5, 0.5) for step in range(4)], "success": 0.5, "seconds": 0.0}

    def fit(grid, options):
        computed.append(options.seeds[0])
        names = ("num_trajectories", "auc", "auc_within_tasks", "calibration_error", "seconds")
        return dict.fromkeys(names, 0.5)

    monkeypatch.setenv("PYTHONPATH", "")  # restored afterwards
    monkeypatch.setattr(reward_model, "_train", train)
    monkeypatch.setattr(reward_model, "_fit", fit)
    folders = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "new" / "results")]
    for seeds, expected in (
        (["1", "2"], ["true-1", "true-2", 1, "model-1", "model-2", "cautious-1", "cautious-2"]),
        (["1", "2"], []),
        (["2", "1"], [2, "model-2", "model-1", "cautious-2", "cautious-1"]),
    ):
        computed.clear()
        reward_model.main([*folders, "--seeds", *seeds])
        assert computed == expected
    assert (tmp_path / "new" / "results" / "reward_model.png").exists()
