import json
from dataclasses import replace

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli import collect, train
from agent_trainers.experimental.skills import __main__ as skills
from agent_trainers.monitoring.metrics_log import read_metrics
from agent_trainers.trajectory import load_trajectories, save_trajectories


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Episodes that succeeded, the two best of each task."""
    path = tmp_path_factory.mktemp("recorded") / "best.jsonl.gz"
    collect.run(
        ["--num_tasks", "12", "--samples_per_task", "4", "--keep", "2", "--output", str(path)]
    )
    return path


def test_a_skill_is_the_actions_of_the_best_episode_and_a_run_reads_them(
    recorded, tmp_path, capsys
):
    output = tmp_path / "skills.jsonl"
    skills.run(["--trajectories", str(recorded), "--output", str(output)])
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    played = load_trajectories(recorded)
    assert [row["task_id"] for row in rows] == list(dict.fromkeys(t.task_id for t in played))
    best = next(t for t in played if t.task_id == rows[0]["task_id"])  # the best stands first
    assert rows[0]["skill"].split("\n") == [t.action for t in best.transitions]
    assert "--extensions" in capsys.readouterr().err

    output.write_text(json.dumps({"skill": "search of the award"}) + "\n")
    path = "agent_trainers.experimental.skills:SkillDistillation"
    extension = json.dumps({path: {"weight": 0.5, "skills": str(output)}})
    command = ["--extensions", extension, "--max_steps", "1", "--save_steps",
               "1", "--num_eval_tasks", "0", "--per_device_train_batch_size", "8",
               "--output_dir", str(tmp_path / "run"), "--disable_tqdm", "true"]  # fmt: skip
    train.run(command)
    assert read_metrics(tmp_path / "run")[0]["skill/share"] == 1.0
    output.write_text(json.dumps({"skill": "search"}) + "\n")
    with pytest.raises(ConfigurationError, match="skills"):
        train.run([*command, "--resume"])


def test_wrong_inputs_are_refused(recorded, tmp_path):
    with pytest.raises(ConfigurationError, match="must end in"):
        skills.run(["--trajectories", str(recorded), "--output", "skills.txt"])
    lost = tmp_path / "lost.jsonl"
    failed = [replace(t, metrics={"success": 0.0}) for t in load_trajectories(recorded)]
    save_trajectories(lost, failed)
    with pytest.raises(DataError, match="no episode succeeded"):
        skills.run(["--trajectories", str(lost)])
