"""Workflows and roles as programs: each is a function that asks the model as one role or several.

    agent-r1-train --program examples.workflows:plan_and_execute --tasks tasks.jsonl --model ...

As it stands, ``python -m examples.workflows`` makes a tiny policy for `plan_and_execute` and trains
planner and executor; what it prints compares them with their untrained selves.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai

from agent_envs.errors import ConfigurationError
from agent_trainers.policies import GenerationRequest, Policy, ScriptedPolicy
from agent_trainers.programs import EnvironmentTools, Outcome, ProgramSession, ProgramTasks
from agent_trainers.rollout.evaluation import evaluate
from agent_trainers.tiny_policy.make import EnvironmentSource, make_tiny_policy
from agent_trainers.trajectory import Trajectory
from examples.train_openai_loop import ENVIRONMENT, solution, train

CLIENT = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")  # made once
MAX_STEPS = 3
Oracle = Callable[[dict[str, Any], Sequence[Any]], str]
"""Returns the correct model turn for a task and the messages so far."""
GAP = "$"
"""Stands in a plan for what the step before it finds."""


def ask(session: ProgramSession, *said: str) -> str:
    """Ask the model; what is said alternates between the program and the model."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": s} for i, s in enumerate(said)]
    client = CLIENT.with_options(base_url=session.base_url, api_key=session.key)
    reply = client.chat.completions.create(model="policy", messages=messages)
    return (reply.choices[0].message.content or "").strip()


def begin(task: dict[str, Any]) -> EnvironmentTools:
    """Begin the task of a row."""
    return EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])


def plan_and_execute(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Plan the whole chain of searches before any of them runs, then fill its gaps and answer."""
    world = begin(task)
    plan = ask(session.role("planner"), f"plan : {world.question}").splitlines()
    executor, found = session.role("executor"), ""
    for step in plan[:MAX_STEPS]:
        query = ask(executor, f"fill : {step}\n{found}") if GAP in step else step
        found = world.call("search", query=query)
    return world.outcome(ask(executor, f"answer : {world.question}\n{found}"))


def oracle(task: dict[str, Any], messages: Sequence[Any]) -> str:
    """Return what planner or executor should say to `plan_and_execute`."""
    calls, answer = solution(task["task"], task["split"])
    queries = [str((call.arguments or {})["query"]) for call in calls]
    said = messages[-1]["content"]
    if said.startswith("plan"):
        first, *others = queries
        return "\n".join([first, *(f"{query.partition(' of ')[0]} of {GAP}" for query in others)])
    if said.startswith("fill"):
        wanted = said.partition(" : ")[2].partition(" of ")[0]
        return next(query for query in queries if query.startswith(f"{wanted} of "))
    return answer


def naive_rag(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Search once for the question itself, and answer from what comes."""
    world = begin(task)
    found = world.call("search", query=world.question)
    return world.outcome(ask(session, f"answer : {world.question}\n{found}"))


def iterative_rag(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Let the model choose each query from what was found, then answer."""
    world = begin(task)
    notes = ""
    for _ in range(MAX_STEPS - 1):
        query = ask(session, f"search : {world.question}\n{notes}")
        notes += world.call("search", query=query) + "\n"
    return world.outcome(ask(session, f"answer : {world.question}\n{notes}"))


def reflect_and_retry(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Try; where that was wrong, say what to do otherwise, and try once more with it in mind."""
    outcome = naive_rag(session.role("solver"), task)
    if outcome.metrics["success"]:
        return outcome
    advice = ask(session.role("reflector"), f"reflect : {begin(task).question}")
    world = begin(task)
    found = world.call("search", query=advice)
    second = world.outcome(ask(session.role("solver"), f"answer : {world.question}\n{found}"))
    # A second success is worth less than a first one.
    return Outcome(reward=0.5 * float(second.metrics["success"]), metrics=second.metrics)


def solver_and_critic(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """One answers, the other says whether that is right; each has a reward of its own."""
    world = begin(task)
    found = world.call("search", query=world.question)
    answer = ask(session.role("solver"), f"answer : {world.question}\n{found}")
    verdict = ask(session.role("critic"), f"judge : {world.question}\n{found}\n{answer}")
    outcome = world.outcome(answer)
    is_right = bool(outcome.metrics["success"])
    is_judged_well = (verdict == "right") == is_right
    return Outcome(
        reward={"solver": float(is_right), "critic": float(is_judged_well)},
        metrics={"success": float(is_right), "judged_well": float(is_judged_well)},
    )


def simulated_user(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Find out what a user wants, who is played by the model, too: --frozen_roles user."""
    world = begin(task)
    user, agent = session.role("user"), session.role("agent")
    heard = ask(user, f"want : {world.question}")
    query = ask(agent, f"search : {heard}")
    found = world.call("search", query=query)
    return world.outcome(ask(agent, f"answer : {heard}\n{found}"))


class ProgramSource(EnvironmentSource):
    """A program in which an oracle answers instead of the model."""

    def __init__(self, tasks: ProgramTasks, oracle: Oracle) -> None:
        """Use the answers of `oracle` in the program of `tasks`."""
        self._tasks, self._oracle = tasks, oracle
        self.num_tasks = tasks.num_tasks
        self.tools = None

    def demonstrate(self, tasks: Sequence[int]) -> list[Trajectory]:
        """Return the successful episodes of the oracle."""

        def act(request: GenerationRequest) -> str:
            self.tools = request.tools
            task = tasks[request.episode_id]  # sessions are opened in the order of the tasks
            return self._oracle(dict(self._tasks.tasks[task]), request.messages)

        episodes = evaluate(self._tasks.make_rollout(ScriptedPolicy(act)), tasks).trajectories
        solved = [episode for episode in episodes if episode.success]
        if not solved:
            error = next((e.error for e in episodes if e.error), "no error was recorded")
            raise ConfigurationError(
                f"The oracle solves none of {len(tasks)} tasks. The first error:\n{error}"
            )
        return solved

    def evaluate(self, policy: Policy, tasks: Sequence[int]) -> float:
        """Return the success of `policy` in the program."""
        return evaluate(self._tasks.make_rollout(policy), tasks).metrics.get("success", 0.0)


if __name__ == "__main__":
    tasks = ProgramTasks(plan_and_execute, [{"task": i, "split": "train"} for i in range(700)])
    policy = Path("runs/planner_policy")
    source = ProgramSource(tasks, oracle)
    make_tiny_policy(source, policy, num_tasks=600)
    train("examples.workflows:plan_and_execute", "plan_and_execute", "--model", str(policy))
