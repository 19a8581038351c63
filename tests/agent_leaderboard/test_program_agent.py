"""An agent that is a program: it calls the model at the gateway; its actions are scored here."""

import pytest

from agent_leaderboard import cli
from agent_leaderboard.records.results import read_run
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.runs import write_config
from tests.agent_trainers.chat_server import chat_server, says

pytest.importorskip("openai", reason="the extra openai is not installed")
pytest.importorskip("uvicorn", reason="the extra gateway is not installed")

CONFIG = """
protocol: {max_retries: 0}
environments:
  - {id: AgentR1/SyntheticMultiHop-v0, name: hops, kwargs: {split: test}, tasks: 3,
     contamination: none}
agents: [{name: random, kind: random}]
"""
PROGRAM = "tests.agent_leaderboard.outside.program:"


def run_program(folder, program):
    config = str(write_config(folder, CONFIG))
    with chat_server(lambda body, number: says("a wrong answer")) as server:
        arguments = ["--program", PROGRAM + program, "--base_url", server.url, "--model", "m"]
        cli.main(["--config", config, "--output", str(folder / "run"), *arguments])
    run = read_run(folder / "run")
    (agent,) = run.manifest.agents
    return folder / "run", agent, run.results["hops", agent.slug]


def test_its_actions_are_scored_whatever_reward_it_returns(tmp_path):
    run, agent, lines = run_program(tmp_path, "run")
    assert (agent.kind, agent.model) == ("program", "m")
    assert agent.settings["program"] == PROGRAM + "run"
    for line in lines:
        assert line.actions[-1] == "<answer> a wrong answer </answer>"
        assert len(line.actions) == 2
        assert not line.success
        assert line.calls == 1
        assert line.prompt_tokens > 0
    assert verify(run).problems == []
    assert any(agent.slug in text for text in verify(run).on_trust)


def test_a_program_without_actions_fails_with_advice(tmp_path):
    _, _, lines = run_program(tmp_path, "silent")
    for line in lines:
        assert "returned no actions" in line.error
        assert "EnvironmentTools(**task['environment'])" in line.error
        assert line.calls == 1
