"""The environment and the tasks that ``agent-r1-eval`` takes from the folder of a run."""

import json
import shutil
import sys

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError
from agent_trainers import TINY_POLICY
from agent_trainers.cli.environments import hold_out
from agent_trainers.cli.evaluate import (
    EvaluateArguments,
    PolicyArguments,
    _use_program,
    open_environment,
)
from tests.agent_trainers.cli.test_train import OWN_ENVIRONMENT

HOP = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make the folder of a run with these settings; its environment has ten tasks."""
    text = OWN_ENVIRONMENT.replace("num_tasks = 5", "num_tasks = 10")
    (tmp_path / "ten_tasks.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    gym.registry.pop("Mine/Own-v0", None)  # other tests register another environment by this id
    yield lambda **settings: _make_run(tmp_path / "run", settings)
    gym.registry.pop("Mine/Own-v0", None)
    sys.modules.pop("ten_tasks", None)


def _make_run(folder, settings):
    shutil.copytree(TINY_POLICY, folder)
    (folder / "settings.json").write_text(json.dumps(settings))
    return folder


def opened(folder, is_training=False, **options):
    options = PolicyArguments(model=str(folder), **options)
    environment, tasks = open_environment(options, is_training=is_training)
    return options.env, environment.env_kwargs, tasks


def test_a_run_is_evaluated_on_its_held_out_tasks_and_collected_on_the_others(run):
    env, kwargs = "ten_tasks:Mine/Own-v0", {"target": "red"}
    folder = run(env=env, env_kwargs=kwargs, eval_env_kwargs={}, num_eval_tasks=200, seed=5)
    split = hold_out(10, 200, 5)
    assert opened(folder) == (env, kwargs, split.eval)
    assert opened(folder, is_training=True, num_tasks=3) == (env, kwargs, split.train[:3])
    assert opened(folder, env=env, env_kwargs='{"target": "blue"}')[1] == {"target": "blue"}
    assert opened(folder, env=HOP, num_tasks=2) == (HOP, {}, [0, 1])  # another environment


OF_PROGRAM = {"program": "my:run", "tasks": "own.jsonl", "reward": "f1", "program_max_calls": 3,
              "num_eval_tasks": 4, "seed": 5}  # fmt: skip


@pytest.mark.parametrize(("given", "expected", "held_out"), [
    pytest.param({}, ("my:run", "own.jsonl", "f1", 3), (4, 5), id="the run's"),
    pytest.param({"program": "my:run", "tasks": "own.jsonl"}, ("my:run", "own.jsonl", "f1", 3),
                 (4, 5), id="the run's, given"),
    pytest.param({"tasks": "other.jsonl", "program_max_calls": 9},
                 ("my:run", "other.jsonl", "f1", 9), None, id="other tasks"),
    pytest.param({"program": "other:run", "tasks": "own.jsonl"},
                 ("other:run", "own.jsonl", None, 64), None, id="another program"),
])  # fmt: skip
def test_options_of_a_program_have_priority_over_its_run(run, given, expected, held_out):
    options = EvaluateArguments(model=str(run(**OF_PROGRAM)), **given)
    assert _use_program(options) == held_out
    names = ("program", "tasks", "reward", "program_max_calls")
    assert tuple(getattr(options, name) for name in names) == expected


def test_the_model_of_a_program_acts_in_an_environment_that_is_given(run):
    folder = run(**OF_PROGRAM)
    assert opened(folder, env=HOP, num_tasks=2) == (HOP, {}, [0, 1])
    with pytest.raises(ConfigurationError, match=r"has the program my:run, .* name one by --env"):
        opened(folder, is_training=True)


def test_a_recipe_needs_no_more_than_an_environment(run):
    assert opened(run(envs=[{"id": HOP, "kwargs": {"hops": 1}}]), num_tasks=1)[1] == {"hops": 1}


def test_the_arguments_of_evaluation_and_the_choice_among_several_environments(run):
    table = "AgentR1/SyntheticTable-v0"
    members = [{"id": HOP, "kwargs": {"hops": 1}, "eval_kwargs": {"split": "test"}, "name": "one"},
               {"id": table, "kwargs": {}}]  # fmt: skip
    folder = run(env=None, envs=members, num_eval_tasks=4, seed=5)
    with pytest.raises(ConfigurationError, match="choose one by --env one, SyntheticTable-v0"):
        opened(folder)
    assert opened(folder, env="one", num_tasks=2) == (HOP, {"hops": 1, "split": "test"}, [0, 1])
    assert opened(folder, env="one", is_training=True, num_tasks=1) == (HOP, {"hops": 1}, [0])
    assert opened(folder, env=HOP, env_kwargs='{"hops": 2}')[1] == {"hops": 2, "split": "test"}
