"""An agent that is a program: it asks the model at the gateway, and its actions are scored here."""

import pytest

from agent_leaderboard import cli
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.small_config import write_config
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


def play(folder, program):
    config = str(write_config(folder, CONFIG))
    with chat_server(lambda body, number: says("a wrong answer")) as server:
        arguments = ["--program", PROGRAM + program, "--base_url", server.url, "--model", "m"]
        cli.main(["--config", config, "--output", str(folder / "run"), *arguments])
    run = RunFolder(folder / "run")
    (agent,) = run.read_manifest().agents
    return run, agent, run.read_results("hops", agent.slug)


def test_what_it_did_is_scored_whatever_it_says_and_others_can_replay_it(tmp_path):
    run, agent, lines = play(tmp_path, "run")
    assert (agent.kind, agent.model) == ("program", "m")
    assert agent.settings["program"] == PROGRAM + "run"
    for line in lines:
        assert line.actions[-1] == "<answer> a wrong answer </answer>"
        assert len(line.actions) == 2
        assert not line.success
        assert line.usage.calls == 1
        assert line.usage.prompt_tokens > 0
    assert verify(run.path).problems == []
    assert any(agent.slug in text for text in verify(run.path).on_trust)


def test_a_program_whose_actions_nobody_could_replay_is_a_fault_that_says_the_way_out(tmp_path):
    _, _, lines = play(tmp_path, "silent")
    for line in lines:
        assert "returned no actions" in line.error
        assert "EnvironmentTools(**task['environment'])" in line.error
        assert line.usage.calls == 1
