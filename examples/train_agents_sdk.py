"""Train an agent of OpenAI's Agents SDK as its documentation writes it, with the embedded policy.

    agent-r1-train --program examples.train_agents_sdk:run --tasks tasks.jsonl

Or as it stands, ``python -m examples.train_agents_sdk``: it writes the tasks and trains on them.
Needs ``pip install openai-agents``.
"""

from typing import Any

import openai
from agents import (
    Agent,
    AgentsException,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)

from agent_trainers.programs import EnvironmentTools, Outcome, ProgramSession
from examples.train_openai_loop import ENVIRONMENT, MAX_TURNS, train

# Made once. All episodes wait in one event loop: a connection may take longer than the default 5 s.
CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=600)


async def run(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Answer a question with an agent that calls the environment's search."""
    world = EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])

    @function_tool
    def search(query: str) -> str:
        """Search the passages for a query."""
        return world.call("search", query=query)

    client = CLIENT.with_options(base_url=session.base_url, api_key=session.key)
    system, question = world.messages
    agent = Agent(
        name="searcher",
        instructions=system["content"],
        tools=[search],
        model=OpenAIResponsesModel(model="policy", openai_client=client),
    )
    config = RunConfig(tracing_disabled=True)
    try:
        result = await Runner.run(
            agent, question["content"], max_turns=MAX_TURNS, run_config=config
        )
    except AgentsException:  # too many turns, or a call that cannot be read: the model's doing
        return world.outcome(None)
    return world.outcome(world.read(str(result.final_output)).answer)


if __name__ == "__main__":
    train("examples.train_agents_sdk:run", "agents_sdk")
