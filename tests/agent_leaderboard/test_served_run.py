"""The leaderboard against a real server: ``transformers serve`` with the embedded policy."""

import pytest
import yaml

from agent_leaderboard import cli
from agent_leaderboard.records.results import read_run
from agent_leaderboard.verify.verify import check_run
from tests.agent_trainers.chat_server import chat_server, refuses, says

pytest.importorskip("openai", reason="the extra openai is not installed")

CONFIG = {
    "protocol": {"temperature": 0.0},
    "environments": [
        {
            "id": "AgentR1/SyntheticMultiHop-v0",
            "kwargs": {"split": "test"},
            "tasks": 3,
            "contamination": "None: generated.",
        }
    ],
}


def agents(served):
    native, text = {"model": served.native}, {"model": served.text, "max_new_tokens": 24}
    native |= {"tool_format": "openai", "max_new_tokens": 24}
    prices = {"prompt": 1.0, "completion": 2.0}
    return [
        {"name": "native", "kind": "base_tool_call", "settings": native, "prices": prices},
        {"name": "react", "kind": "react", "settings": text},
        {"name": "naive RAG", "kind": "naive_rag", "settings": text},
    ]


def test_a_run_of_agents_on_a_server_verifies(served, tmp_path, capsys):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(CONFIG | {"agents": agents(served)}), encoding="utf-8")
    cli.main(["--config", str(config), "--output", str(run), "--base_url", served.url])
    assert check_run(run).problems == []
    manifest = (run / "manifest.json").read_text(encoding="utf-8")
    assert served.url not in manifest  # it is of this machine
    for results in read_run(run).results.values():
        assert len(results) == 3
        for one in results:
            assert one.error is None
            assert one.calls > 0
            assert one.prompt_tokens > 0
    one = read_run(run).results["syntheticmultihop", "native"][0]
    assert one.money == pytest.approx((one.prompt_tokens + 2 * one.completion_tokens) / 1e6)
    assert "native" in capsys.readouterr().out


@pytest.mark.parametrize(("num_faults", "is_scored"), [(2, True), (1000, False)])
def test_a_server_failure_is_retried_and_never_scored(num_faults, is_scored, tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    agent = {"name": "served", "kind": "base_tool_call", "settings": {"model": "m"}}
    (environment,) = CONFIG["environments"]
    text = {
        "protocol": {"max_retries": 2, "concurrency": 1},
        "environments": [environment | {"tasks": 1}],
        "agents": [agent],
    }
    config.write_text(yaml.safe_dump(text), encoding="utf-8")

    def reply(_, number):
        return refuses(400, "no") if number < num_faults else says("<answer>x</answer>")

    with chat_server(reply) as server:
        cli.main(["--config", str(config), "--output", str(run), "--base_url", server.url])
    assert check_run(run).problems == []
    ((one,),) = read_run(run).results.values()
    assert (one.error is None) == is_scored
    assert one.actions == (["<answer>x</answer>"] if is_scored else [])
    assert len(server.bodies) == 3


def test_an_unfit_agent_is_refused_before_any_episode(tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    settings = {"model": "m", "base_url": "http://localhost:1/v1"}
    agent = {"name": "rag", "kind": "naive_rag", "settings": settings}
    environment = CONFIG["environments"][0] | {"id": "AgentR1/SyntheticArithmetic-v0"}
    text = CONFIG | {"agents": [agent], "environments": [environment]}
    config.write_text(yaml.safe_dump(text), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"Agent 'naive_rag' needs .*SyntheticArithmetic"):
        cli.main(["--config", str(config), "--output", str(run)])
    assert not (run / "manifest.json").exists()
