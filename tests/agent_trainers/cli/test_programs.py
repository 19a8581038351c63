"""Programs on the command line, from the tasks' file to results."""

import json

import pytest

from agent_trainers.cli import evaluate, train

PROGRAM = """
import atexit

import httpx

CLIENT = httpx.Client(timeout=60)
atexit.register(CLIENT.close)


def run(session, task):
    reply = CLIENT.post(
        session.base_url + "/chat/completions",
        headers={"Authorization": "Bearer " + session.key},
        json={"model": "policy", "messages": [{"role": "user", "content": task["question"]}]},
    )
    reply.raise_for_status()
    return reply.json()["choices"][0]["message"]["content"]


def score(task, answer):
    return float(len(answer) % 2)
"""


def test_a_program_is_trained_and_evaluated(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name = f"agent_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    rows = [{"question": f"what is the award of film {i} ?", "answer": "pearl"} for i in range(10)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    agent = ["--program", f"{name}:run", "--tasks", "tasks.jsonl", "--reward", f"{name}:score"]
    brief = ["--max_steps=1", "--per_device_train_batch_size=8", "--num_eval_tasks=2"]
    with pytest.raises(SystemExit, match="0"):
        train.main([*agent, *brief, "--output_dir=out"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["program"] == agent[1]
    assert results["num_eval_episodes"] == 2
    assert results["evaluated_on"].startswith("2 of 10 tasks")

    evaluate.main([*agent, "--num_tasks=3", "--output=measured.json"])
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert (measured["program"], measured["tasks"]) == (agent[1], "tasks.jsonl")
    assert measured["num_tasks"] == 3
    assert measured["usage"]["calls"] == 3

    # other tasks under the same name are another run
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"question": "who ?"}\n')
    with pytest.raises(SystemExit, match="2"):
        train.main([*agent, *brief, "--output_dir=out", "--resume"])
    assert "began with other settings (data:" in capsys.readouterr().err
