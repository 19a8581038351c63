"""Programs on the command line, from the tasks' file to results."""

import json

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli import evaluate, train
from agent_trainers.cli.environments import check_program, read_source
from agent_trainers.cli.train_options import TrainArguments, parse_arguments

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


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The options that name a program in the working directory."""
    monkeypatch.chdir(tmp_path)
    name = f"agent_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROGRAM)
    rows = [{"question": f"what is the award of film {i} ?", "answer": "pearl"} for i in range(10)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--program", f"{name}:run", "--tasks", "tasks.jsonl", "--reward", f"{name}:score"]


def test_a_program_is_trained_and_evaluated(agent, tmp_path, capsys):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": "t.jsonl"}, "--tasks does nothing without --program"),
        ({"frozen_roles": ["user"]}, "--frozen_roles does nothing without --program"),
        ({"program_runner": "process"}, "--program_runner does nothing"),
        ({"program": "a:run", "env": ["AgentR1/GSM8K-v0"]}, "--env is for environments"),
        ({"program": "a:run", "env_kwargs": "{}"}, "--env_kwargs is for environments"),
    ],
)
def test_options_of_programs_and_of_environments_do_not_mix(changes, message):
    options = TrainArguments(**changes)
    with pytest.raises(ConfigurationError, match=message):
        check_program(options)


def test_a_program_replaces_the_environment_of_the_recipe():
    options, _ = parse_arguments(["--program", "a:run", "--tasks", "t.jsonl"])
    assert read_source(options).settings == {
        "program": "a:run", "tasks": "t.jsonl", "eval_tasks": None, "reward": None,
        "frozen_roles": None,
    }  # fmt: skip


def test_a_program_needs_tasks(agent, tmp_path):
    options = TrainArguments(program=agent[1])
    with pytest.raises(ConfigurationError, match="--program needs --tasks"):
        options.program_tasks(None)
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match=r"none\.jsonl"):
        options.program_tasks("none.jsonl")
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        options.program_tasks("missing.jsonl")
