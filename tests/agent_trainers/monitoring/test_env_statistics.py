from dataclasses import replace

from agent_trainers.monitoring.episode_statistics import (
    EpisodeSummary,
    EvaluatedEnvironments,
    env_metrics,
)
from agent_trainers.trajectory import StopReason


def episode(env, task, success, reward=0.0):
    return EpisodeSummary(
        task_id=task, group_id=f"{env}-{task}", rewards=(reward,), lengths=(3,), anchors=(b"",),
        states=("",), is_truncated=False, is_scorable=True, reward_terms=({},),
        metrics={"success": success},
        stop_reason=StopReason.ANSWERED, error=None, step_counts={}, tool_calls={}, tool_errors={},
        num_cut_results=0, tool_seconds=[], num_tokens=4, timings={}, env=env,
    )  # fmt: skip


def test_each_environment_has_its_own_figures_without_its_unscorable_episodes():
    broken = replace(episode("b", "2", 0.0), is_scorable=False)
    episodes = [episode("a", "1", 1.0, 2.0), episode("a", "2", 0.0), episode("b", "1", 1.0, 3.0)]
    metrics = env_metrics([*episodes, broken], ["a", "b", "c"])
    assert (metrics["env/a/success"], metrics["env/b/success"]) == (0.5, 1.0)
    assert (metrics["env/a/reward"], metrics["env/b/reward"]) == (1.0, 3.0)
    assert [metrics[f"env/{name}/share"] for name in "abc"] == [0.5, 0.5, 0]
    assert metrics["env/b/episodes/unscorable"] == 0.5
    assert "env/c/success" not in metrics


def test_an_evaluation_is_one_mean_over_all_of_its_batches():
    tally = EvaluatedEnvironments(["a", "b", "v"], {"v"}, 1)
    tally.add([episode("a", str(i), 1.0) for i in range(4)], ())
    rest = [episode("b", "0", 0.0), episode("v", "0", 1.0), episode("v", "1", 0.0)]
    again = episode("a", "0", 0.0)  # fills the last batch up
    metrics = tally.add([*rest, again], ())
    assert metrics["success"] == 4 / 5  # not (1 + 0) / 2
    assert (metrics["env/a/success"], metrics["env/v/success"]) == (1.0, 0.5)
    tally.clear()
    assert tally.add([episode("a", "0", 0.0), episode("v", "0", 1.0)], ())["success"] == 0.0
