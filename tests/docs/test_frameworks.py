"""Agents of other frameworks as programs, as their documentation writes them.

``make test-frameworks`` installs the packages; what is not there is skipped.
"""

import importlib

import pytest

from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.programs import EnvironmentTools, ProgramTasks
from agent_trainers.rollout.evaluation import evaluate
from examples.train_openai_loop import ENVIRONMENT

FRAMEWORKS = {
    "train_openai_loop": "openai",
    "train_langgraph": "langchain_openai",
    "train_agents_sdk": "agents",
    "train_smolagents": "smolagents",
}
TASKS = [{"task": i, "split": "train"} for i in range(4)]
pytestmark = pytest.mark.filterwarnings("default")  # theirs are none of ours


@pytest.fixture(params=FRAMEWORKS)
def example(request):
    pytest.importorskip(FRAMEWORKS[request.param])
    return importlib.import_module(f"examples.{request.param}")


def references(task, messages):
    world = EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])
    return world.reference_actions()[sum(m["role"] == "assistant" for m in messages)]


def test_an_unchanged_loop_solves_every_task_when_the_model_does(example):
    say = getattr(example, "oracle", references)
    policy = ScriptedPolicy(lambda request: say(TASKS[request.episode_id], request.messages))
    evaluation = evaluate(ProgramTasks(example.run, TASKS).make_rollout(policy), range(4))
    assert [t.error for t in evaluation.trajectories] == [None] * 4
    assert evaluation.metrics["success"] == 1.0
    assert evaluation.metrics["return"] == pytest.approx(1.2)  # the rewards of the environment
    assert all(len(t.transitions) == 3 for t in evaluation.trajectories)
