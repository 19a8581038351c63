"""The leaderboard against a real server: ``transformers serve`` with the embedded policy."""

import json

import pytest
import yaml

from agent_leaderboard import cli
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


def test_agents_on_a_server_are_measured_and_their_run_is_verified(served, tmp_path, capsys):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    config.write_text(yaml.safe_dump(CONFIG | {"agents": agents(served)}), encoding="utf-8")
    cli.main(["--config", str(config), "--output", str(run), "--base_url", served.url])
    cli.main(["verify", str(run)])
    manifest = (run / "manifest.json").read_text(encoding="utf-8")
    assert served.url not in manifest  # it belongs to this machine
    (folder,) = (run / "results").iterdir()
    for path in folder.iterdir():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert [line["task"] for line in lines] == sorted(line["task"] for line in lines)
        assert len(lines) == 3
        for line in lines:
            assert line["error"] is None
            assert line["usage"]["calls"] > 0
            assert line["usage"]["prompt_tokens"] > 0
    usage = json.loads((folder / "native.jsonl").read_text().splitlines()[0])["usage"]
    cost = (usage["prompt_tokens"] + 2 * usage["completion_tokens"]) / 1e6
    assert usage["money"] == pytest.approx(cost)
    assert "native" in capsys.readouterr().out


@pytest.mark.parametrize(("num_faults", "is_scored"), [(2, True), (1000, False)])
def test_a_fault_of_the_server_is_tried_again_and_never_scored(num_faults, is_scored, tmp_path):
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
    cli.main(["verify", str(run)])
    (path,) = (run / "results").rglob("*.jsonl")
    (line,) = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    assert (line["error"] is None) == is_scored
    assert line["actions"] == (["<answer>x</answer>"] if is_scored else [])
    assert len(server.bodies) == 3


def test_an_agent_that_cannot_play_is_refused_before_anything_is_written(tmp_path):
    config, run = tmp_path / "config.yaml", tmp_path / "run"
    settings = {"model": "m", "base_url": "http://localhost:1/v1"}
    agent = {"name": "rag", "kind": "naive_rag", "settings": settings}
    environment = CONFIG["environments"][0] | {"id": "AgentR1/SyntheticArithmetic-v0"}
    text = CONFIG | {"agents": [agent], "environments": [environment]}
    config.write_text(yaml.safe_dump(text), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"Agent 'naive_rag' needs .*SyntheticArithmetic"):
        cli.main(["--config", str(config), "--output", str(run)])
    assert not (run / "manifest.json").exists()
