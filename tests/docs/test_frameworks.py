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


CALL = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'


class Guided(ScriptedPolicy):
    """A script that follows every schema."""

    def check_guide(self, guide):
        self.guide = guide


def run_anthropic(session, task):
    import anthropic

    client = anthropic.Anthropic(base_url=session.base_url, api_key=session.key)
    tool = {"name": "look_up", "input_schema": {"type": "object"}}
    options = {"model": "policy", "max_tokens": 1000, "tools": [tool]}
    messages = [{"role": "user", "content": "how many people live in oslo ?"}]
    with client.messages.stream(messages=messages, **options) as stream:
        reply = stream.get_final_message()
    result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "700000"}
    messages += [{"role": "assistant", "content": reply.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
    return float(client.messages.create(messages=messages, **options).content[0].text)


async def run_pydantic_ai(session, task):
    import pydantic
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class City(pydantic.BaseModel):
        people: int

    provider = OpenAIProvider(base_url=session.base_url, api_key=session.key)
    agent = Agent(OpenAIChatModel("policy", provider=provider), output_type=City)
    agent.tool_plain(lambda: "700000", name="look_up", description="Look up.")
    return float((await agent.run("how many people live in oslo ?")).output.people)


async def run_llama_index(session, task):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    def look_up() -> str:
        """Look up."""
        return "700000"

    model = OpenAILike(
        model="policy", api_base=session.base_url, api_key=session.key, is_chat_model=True,
        is_function_calling_model=True,
    )  # fmt: skip
    agent = FunctionAgent(tools=[look_up], llm=model)
    return float(str(await agent.run("how many people live in oslo ?")))


@pytest.mark.parametrize(
    ("library", "run", "answer"),
    [
        ("anthropic", run_anthropic, "700000"),
        ("pydantic_ai", run_pydantic_ai, CALL.format("final_result", '{"people": 700000}')),
        ("llama_index", run_llama_index, "700000"),
    ],
)
def test_an_agent_with_its_defaults_calls_a_tool_and_answers(library, run, answer):
    pytest.importorskip(library)

    def say(request):
        is_answered = request.messages[-1]["role"] == "tool"
        return answer if is_answered else CALL.format("look_up", "{}")

    tasks = ProgramTasks(run, [{}], ignored_parameters=["temperature"])  # LlamaIndex sends 0.1
    (episode,) = evaluate(tasks.make_rollout(Guided(say)), range(1)).trajectories
    assert (episode.error, episode.return_) == (None, 700_000.0)
    assert len(episode.transitions) == 2
