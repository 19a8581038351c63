"""Train a LangGraph agent as LangGraph's documentation writes it, with the embedded policy.

    agent-r1-train --program examples.train_langgraph:run --tasks tasks.jsonl

Or as it stands, ``python -m examples.train_langgraph``: it writes the tasks and trains on them.
Needs ``pip install langgraph langchain langchain-openai``.
"""

from typing import Any

import httpx
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError

from agent_trainers.programs import EnvironmentTools, Outcome, ProgramSession
from examples.train_openai_loop import ENVIRONMENT, train

# Made once: a client takes its time to make.
CLIENTS = {
    "http_client": httpx.Client(limits=httpx.Limits(max_connections=None)),
    "http_async_client": httpx.AsyncClient(limits=httpx.Limits(max_connections=None)),
}


def run(session: ProgramSession, task: dict[str, Any]) -> Outcome:
    """Answer a question with an agent that calls the environment's search."""
    world = EnvironmentTools(ENVIRONMENT, task=task["task"], split=task["split"])

    def search(query: str) -> str:
        """Search the passages for a query."""
        return world.call("search", query=query)

    model = ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.key, **CLIENTS)
    system, question = world.messages
    agent = create_agent(model, tools=[search], system_prompt=system["content"])
    try:
        state = agent.invoke({"messages": [question]}, {"recursion_limit": 12})
    except GraphRecursionError:  # the model went on and on
        return world.outcome(None)
    return world.outcome(world.read(state["messages"][-1].text).answer)


if __name__ == "__main__":
    train("examples.train_langgraph:run", "langgraph")
