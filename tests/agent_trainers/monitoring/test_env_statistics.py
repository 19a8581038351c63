from dataclasses import replace

import numpy as np
import pytest

from agent_trainers.monitoring.env_statistics import (
    EvaluatedEnvironments,
    SuccessCurve,
    env_metrics,
    success_curves,
)
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.monitoring.report import plot_learning_curve, trajectory_page
from agent_trainers.trajectory import StopReason


def episode(env, task, success, reward=0.0):
    return EpisodeSummary(
        task_id=task, group_id=f"{env}-{task}", rewards=(reward,), lengths=(3,), anchors=(b"",),
        is_truncated=False, is_scorable=True, reward_terms={}, metrics={"success": success},
        stop_reason=StopReason.ANSWERED, step_counts={}, tool_calls={}, tool_errors={},
        tool_seconds=[], num_tokens=4, timings={}, env=env,
    )  # fmt: skip


def test_each_environment_has_its_own_figures_without_its_unscorable_episodes():
    broken = replace(episode("b", "2", 0.0), is_scorable=False)
    episodes = [episode("a", "1", 1.0, 2.0), episode("a", "2", 0.0), episode("b", "1", 1.0, 3.0)]
    metrics = env_metrics([*episodes, broken], [np.zeros(1)] * 4, ["a", "b", "c"])
    assert (metrics["env/a/success"], metrics["env/b/success"]) == (0.5, 1.0)
    assert (metrics["env/a/reward"], metrics["env/b/reward"]) == (1.0, 3.0)
    assert [metrics[f"env/{name}/share"] for name in "abc"] == [0.5, 0.5, 0]
    assert metrics["env/b/episodes/unscorable"] == 0.5
    assert "env/c/success" not in metrics


def test_an_evaluation_is_one_mean_over_all_of_its_batches():
    tally = EvaluatedEnvironments(["a", "b", "v"], {"v"}, 1)
    tally.add([episode("a", str(i), 1.0) for i in range(4)], [np.zeros(1)] * 4, ())
    rest = [episode("b", "0", 0.0), episode("v", "0", 1.0), episode("v", "1", 0.0)]
    again = episode("a", "0", 0.0)  # fills the last batch up
    metrics = tally.add([*rest, again], [np.zeros(1)] * 4, ())
    assert metrics["success"] == 4 / 5  # not (1 + 0) / 2
    assert (metrics["env/a/success"], metrics["env/v/success"]) == (1.0, 0.5)
    assert metrics["env/v/of_in_domain"] == pytest.approx(0.5 / 0.8)
    tally.clear()
    unsolved = tally.add([episode("a", "0", 0.0), episode("v", "0", 1.0)], [[0.0]] * 2, ())
    assert unsolved["success"] == 0.0
    assert "env/v/of_in_domain" not in unsolved


FIGURES = {
    "a": {"is_trained": True, "success_before": 0.1, "success_after": 0.9},
    "v": {"is_trained": False, "success_before": 0.0, "success_after": 0.6},
}
HISTORY = [
    {"step": 1, "reward": 0.2, "success": 0.2, "env/a/success": 0.2},
    {"step": 1, "eval_success": 0.4, "eval_env/a/success": 0.4, "eval_env/v/success": 0.3},
    {"step": 2, "reward": 0.5, "success": 0.5, "env/a/success": 0.5},
]


def test_curves_are_of_training_and_of_evaluation_and_are_plotted_and_on_the_page(tmp_path):
    curves = success_curves(HISTORY, FIGURES)
    assert curves == [
        SuccessCurve("a", False, True, [(1, 0.2), (2, 0.5)]),
        SuccessCurve("a", True, True, [(0, 0.1), (1, 0.4), (2, 0.9)]),
        SuccessCurve("v", True, False, [(0, 0.0), (1, 0.3), (2, 0.6)]),
    ]
    assert success_curves(HISTORY, {}) == []
    plain, drawn = tmp_path / "plain.png", tmp_path / "drawn.png"
    plot_learning_curve(plain, HISTORY, before=0.1, after=0.9)
    plot_learning_curve(drawn, HISTORY, before=0.1, after=0.9, curves=curves)
    assert drawn.read_bytes() != plain.read_bytes()
    page = trajectory_page([], tokenizer=None, title="A run", curves=curves)
    row = page[page.index("evaluation only") :]
    assert [f"{value} %" in row for value in ("0.0", "30.0", "60.0")] == [True] * 3
    assert "Success in evaluation" not in trajectory_page([], tokenizer=None, title="A run")
