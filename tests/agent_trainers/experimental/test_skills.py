import json

import pytest

from agent_envs.errors import ConfigurationError, DataError, RolloutError
from agent_trainers.cli import collect, train
from agent_trainers.experimental.skills import __main__ as skills
from agent_trainers.trajectory import load_trajectories
from tests.agent_trainers.chat_server import chat_server, refuses, says


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Episodes that succeeded, the two best of each task."""
    path = tmp_path_factory.mktemp("recorded") / "best.jsonl.gz"
    collect.run(
        ["--num_tasks", "12", "--samples_per_task", "4", "--keep", "2", "--output", str(path)]
    )
    return path


def mine(recorded, output, *arguments):
    skills.run(["--trajectories", str(recorded), "--output", str(output), *arguments])
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_without_a_model_a_skill_is_the_actions_of_the_best_episode(recorded, tmp_path, capsys):
    rows = mine(recorded, tmp_path / "skills.jsonl")
    played = load_trajectories(recorded)
    assert [row["task_id"] for row in rows] == list(dict.fromkeys(t.task_id for t in played))
    best = next(t for t in played if t.task_id == rows[0]["task_id"])  # the best stands first
    assert rows[0]["skill"].split("\n") == [t.action for t in best.transitions]
    assert "--extensions" in capsys.readouterr().err


def test_a_model_writes_skills_and_a_general_one(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    output = tmp_path / "skills.jsonl"

    def reply(body, number):
        question = body["messages"][-1]["content"]
        assert "tools" not in body
        if "ACTION:" in question:
            return says("<think>hm</think> Search twice.")
        return says(f"Search, {question.count('Search twice.')} times.")

    arguments = ("--model", "m")
    with chat_server(reply) as server:
        rows = mine(recorded, output, *arguments, "--base_url", server.url)
        num_requests = len(server.bodies)
        again = mine(recorded, output, *arguments, "--base_url", server.url)
        assert len(server.bodies) == num_requests  # existing skills are kept
    num_solved = len({t.task_id for t in load_trajectories(recorded)})
    assert rows == again
    assert [row["skill"] for row in rows[:-1]] == ["Search twice."] * num_solved
    assert rows[-1] == {"skill": f"Search, {num_solved} times.", "task_id": None}
    first = server.bodies[0]["messages"][-1]["content"]
    assert "OBSERVATION: [1]" in first
    with (
        chat_server(lambda body, number: refuses(400, "no")) as server,
        pytest.raises(RolloutError, match="requests to the model failed"),
    ):
        mine(recorded, tmp_path / "none.jsonl", *arguments, "--base_url", server.url)


def test_a_run_with_a_file_of_skills_resumes_only_with_the_same_skills(recorded, tmp_path):
    file = tmp_path / "skills.jsonl"
    file.write_text(json.dumps({"skill": "search of the award"}) + "\n")
    path = "agent_trainers.experimental.skills:SkillDistillation"
    extension = json.dumps({path: {"weight": 0.5, "skills": str(file)}})
    command = ["--extensions", extension, "--max_steps", "1", "--save_steps",
               "1", "--num_eval_tasks", "0", "--per_device_train_batch_size", "8",
               "--output_dir", str(tmp_path / "run"), "--disable_tqdm", "true"]  # fmt: skip
    train.run(command)
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert log[0]["skill/share"] == 1.0
    file.write_text(json.dumps({"skill": "search"}) + "\n")
    with pytest.raises(ConfigurationError, match="skills"):
        train.run([*command, "--resume"])


def test_wrong_inputs_are_refused(recorded, tmp_path):
    with pytest.raises(ConfigurationError, match="must end in"):
        skills.run(["--trajectories", str(recorded), "--output", "skills.txt"])
    with pytest.raises(ConfigurationError, match="--base_url needs --model"):
        mine(recorded, tmp_path / "skills.jsonl", "--base_url", "http://localhost:1/v1")
    lost = tmp_path / "lost.jsonl"
    collect.run(["--num_tasks", "1", "--samples_per_task", "1", "--keep_failures", "true",
                 "--env_kwargs", '{"hops": 3}', "--output", str(lost)])  # fmt: skip
    with pytest.raises(DataError, match="no episode succeeded"):
        mine(lost, tmp_path / "skills.jsonl")
    (tmp_path / "other.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(DataError, match="row 1: 'skill' must be a text"):
        mine(recorded, tmp_path / "other.jsonl")
