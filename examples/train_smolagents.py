"""Train a smolagents agent as its documentation writes it, with a tiny policy that knows its words.

smolagents tells the model what was called and found in a wording of its own, and answers are calls
of `final_answer`; the embedded policy knows neither. So ``python -m examples.train_smolagents``
first makes a policy from what an oracle says to the same program. Needs ``pip install
'smolagents[openai]'``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
from smolagents import LogLevel, OpenAIModel, Tool, ToolCallingAgent

from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers.programs import EnvironmentTools, Outcome, ProgramSession, ProgramTasks
from agent_trainers.tiny_policy.make import make_tiny_policy
from examples.train_openai_loop import ENVIRONMENT, MAX_TURNS, solution, train
from examples.workflows import ProgramSource

HERMES = TOOL_FORMATS["hermes"]
HTTP = httpx.Client(limits=httpx.Limits(max_connections=None))  # made once: it takes its time


class Search(Tool):
    """The environment's search as a tool of smolagents."""

    name = "search"
    description = "Search the passages for a query."
    inputs: ClassVar = {"query": {"type": "string", "description": "What to look for."}}
    output_type = "string"

    def __init__(self, world: EnvironmentTools) -> None:
        """Search in `world`."""
        super().__init__()
        self.world = world

    def forward(self, query: str) -> str:
        """Search."""
        return self.world.call("search", query=query)


def run(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Answer a question with an agent that calls the environment's search."""
    world = EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])
    model = OpenAIModel(
        "policy",
        session.base_url,
        session.key,
        client_kwargs={"http_client": HTTP},
        tool_choice="auto",  # its default, "required", cannot be promised of a model that samples
    )
    agent = ToolCallingAgent(
        tools=[Search(world)], model=model, max_steps=MAX_TURNS - 1, verbosity_level=LogLevel.OFF
    )
    answer = agent.run(world.messages[-1]["content"])
    return world.outcome(None if answer is None else str(answer))


def oracle(task: dict[str, Any], messages: Sequence[Any]) -> str:
    """Return the turn that solves the task from here."""
    calls, answer = solution(task["task"], task["split"])
    place = sum(message["role"] == "assistant" for message in messages)
    if place < len(calls):
        call = calls[place]
        return HERMES.write_call(call.name or "", call.arguments or {})
    return HERMES.write_call("final_answer", {"answer": answer})


if __name__ == "__main__":
    tasks = ProgramTasks(run, [{"task": number, "split": "train"} for number in range(1600)])
    policy = Path("runs/smolagents_policy")
    source = ProgramSource(tasks, oracle)
    make_tiny_policy(source, policy, num_tasks=1500)
    train("examples.train_smolagents:run", "smolagents", "--model", str(policy))
