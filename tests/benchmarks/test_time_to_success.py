import subprocess

import pytest

from benchmarks.performance import time_to_success

STEP = {
    "time/rollout_seconds": 0.5, "time/score_seconds": 0.25, "time/train_seconds": 0.25,
    "time/generate_seconds": 0.3,
}  # fmt: skip


def test_the_goal_is_reached_where_two_checkpoints_in_a_row_are_at_it():
    solved = {10: 0.99, 2: 0.5, 4: 0.95, 6: 0.85, 8: 0.9}  # at step 4 it was luck
    found = time_to_success.summarize([STEP] * 12, solved)
    assert found["reached"] == {"steps": 8, "seconds": 8.0}
    assert (found["seconds"], found["steps"]) == (12.0, 12)
    assert list(found["solved"]) == ["2", "4", "6", "8", "10"]
    assert found["seconds_per_step"] == {
        "rollout": 0.5, "score": 0.25, "train": 0.25, "generate": pytest.approx(0.3),
        "environment": 0.0,
    }  # fmt: skip
    assert time_to_success.summarize([STEP] * 4, {2: 0.5, 4: 1.0})["reached"] is None


def test_the_report_says_the_ratio_of_the_seeds_that_both_reached():
    def run(seed, seconds):
        reached = None if seconds is None else {"steps": 9, "seconds": seconds}
        return {
            "seed": seed, "reached": reached, "held_out_success": 0.95, "seconds_per_step": {},
        }  # fmt: skip

    runs = {"this": [run(1, 5.0), run(2, 3.0), run(3, 1.0)], "v0": [run(1, 10.0), run(2, None),
            run(3, 4.0)]}  # fmt: skip
    text = time_to_success.report(runs)
    assert "by seed: 0.50 0.25; median 0.38." in text
    assert "| v0 | 2 | never |  | 95.0 % |" in text
    never = {name: own[1:2] for name, own in runs.items()}
    assert "No seed reached 90 % in both versions." in time_to_success.report(never)


def test_the_packages_of_a_reference_are_checked_out(tmp_path):
    root, folder = tmp_path / "root", tmp_path / "other"
    for package in ("agent_envs", "agent_trainers"):
        (root / package).mkdir(parents=True)
        (root / package / "__init__.py").write_text("old")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=root, check=True
        )
    (root / "agent_envs" / "__init__.py").write_text("new")
    time_to_success.check_out(root, "HEAD", folder)
    assert (folder / "agent_envs" / "__init__.py").read_text() == "old"
