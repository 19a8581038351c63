"""A program of a user's own: it asks the model for an answer, and says that it was right."""

from dataclasses import replace

from agent_trainers.programs import EnvironmentTools, Outcome
from tests.agent_trainers.gateway.programs import client_of


def run(session, task):
    with EnvironmentTools(**task["environment"]) as world:
        found = world.call("search", query=world.question)
        messages = [{"role": "user", "content": f"{found}\n{world.question}"}]
        reply = client_of(session).chat.completions.create(model="policy", messages=messages)
        outcome = world.outcome(reply.choices[0].message.content)
    return replace(outcome, reward=1.0, metrics={"success": 1.0})


def silent(session, task):
    client_of(session).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "hello"}]
    )
    return Outcome(reward=1.0)
