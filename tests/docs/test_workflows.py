"""The workflows in examples/, played by an oracle and by whoever says nothing right."""

import pytest

from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.programs import ProgramTasks
from agent_trainers.rollout.evaluation import evaluate
from examples import workflows

TASKS = [{"task": i, "split": "train"} for i in range(6)]
ROLES = {
    "plan_and_execute": {"planner", "executor"},
    "naive_rag": {""},
    "iterative_rag": {""},
    "reflect_and_retry": {"solver", "reflector"},
    "solver_and_critic": {"solver", "critic"},
    "simulated_user": {"user", "agent"},
}


def play(name, act, **options):
    source = ProgramTasks(getattr(workflows, name), TASKS, **options)
    return evaluate(source.make_rollout(ScriptedPolicy(act)), range(len(TASKS)))


def test_an_oracle_plans_and_executes_every_task():
    def act(request):
        return workflows.oracle(TASKS[request.episode_id], request.messages)

    evaluation = play("plan_and_execute", act)
    assert evaluation.metrics["success"] == 1.0
    planner, *executor = evaluation.trajectories[0].transitions
    assert planner.action.count("\n") == 1, "the whole chain stands before anything runs"
    assert (planner.role, {step.role for step in executor}) == ("planner", {"executor"})


@pytest.mark.parametrize("name", ROLES)
def test_each_workflow_ends_with_an_outcome_whatever_the_model_says(name):
    evaluation = play(name, lambda request: "nothing of use")
    assert evaluation.num_failed == 0
    assert evaluation.metrics["success"] == 0.0
    played = {step.role for t in evaluation.trajectories for step in t.transitions}
    assert played == ROLES[name]
