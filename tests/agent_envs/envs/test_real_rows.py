"""Reference actions solve rows of the real data sets."""

import gymnasium as gym
import pytest

from tests.agent_envs.envs.playing import solve


@pytest.mark.parametrize(
    ("env_id", "name", "step", "total", "metric"),
    [
        ("HotpotQA", "hotpotqa_dev_distractor.jsonl.gz", 40, 1.2, "gold_passage_recall"),
        ("2WikiMultihopQA", "2wikimultihopqa_dev.jsonl.gz", 40, 1.2, "gold_passage_recall"),
        ("MuSiQue", "musique_dev.jsonl.gz", 40, 1.2, "gold_passage_recall"),
        ("Bamboogle", "bamboogle_test.jsonl", 20, 1.0, "success"),  # names no gold passages
        ("GSM8K", "gsm8k_test.jsonl", 25, 1.2, "official_match"),
        ("MATH", "math500_test.jsonl", 25, 1.0, "success"),
        ("HumanEval", "humaneval_test.jsonl", 60, 1.2, "success"),  # every row takes a minute
        ("MBPP", "mbpp.jsonl", 60, 1.2, "success"),
    ],
)
def test_reference_actions_solve_real_rows(
    shared_data, strong_sandbox, env_id, name, step, total, metric
):
    env = gym.make(f"AgentR1/{env_id}-v0", data=str(shared_data / name))
    for task in range(0, env.unwrapped.num_tasks, step):
        earned, info = solve(env, task)
        assert info["metrics"]["success"] == info["metrics"][metric] == 1.0, info["task_id"]
        assert 1.0 <= earned <= total + 1e-9
