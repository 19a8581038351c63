"""Leaderboard and evaluation on a real server: ``transformers serve`` with the embedded policy."""

import json

import pytest
import yaml

from agent_leaderboard import cli
from agent_leaderboard.records.results import read_run
from agent_leaderboard.verify.verify import check_run
from agent_trainers.trajectory import load_trajectories
from tests.agent_trainers.chat_server import chat_server, refuses, says
from tests.served_model import transformers_serve

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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The embedded policy behind ``transformers serve``."""
    pytest.importorskip("transformers", reason="the extra train is not installed")
    with transformers_serve(tmp_path_factory.mktemp("served")) as models:
        yield models


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


def measure(tmp_path, *options):
    """Run agent-r1-eval; return what it wrote."""
    from agent_trainers.cli import evaluate

    output, episodes = tmp_path / "eval.json", tmp_path / "episodes.jsonl"
    evaluate.run(["--output", str(output), "--trajectories", str(episodes), *options])
    return json.loads(output.read_text(encoding="utf-8")), load_trajectories(episodes)


def test_a_served_model_with_its_own_calls_does_what_it_does_locally(served, tmp_path):
    options = ["--greedy", "--num_tasks", "6", "--max_completion_length", "24"]
    as_served = ["--model", served.native, "--dtype", "float32"]
    local, local_episodes = measure(tmp_path, *as_served, *options)
    server = ["--base_url", served.url, "--model", served.native, "--tool_format", "openai"]
    remote, episodes = measure(tmp_path, *server, *options)
    assert remote["metrics"] == local["metrics"]
    assert remote["metrics"]["num_tool_calls"] > 0
    assert remote["num_failed"] == 0
    for episode, local_episode in zip(episodes, local_episodes, strict=True):
        understood, same = (
            [t.info["action"] for t in e.transitions] for e in (episode, local_episode)
        )
        assert understood == same
        assert episode.usage["calls"] == len(episode.transitions)
        # The server counts the very tokens that the local model was given and wrote.
        assert episode.usage == local_episode.usage


def test_a_served_model_makes_calls_as_text(served, tmp_path):
    result, episodes = measure(
        tmp_path, "--base_url", served.url, "--model", served.text, "--tool_format", "hermes",
        "--num_tasks", "1", "--samples_per_task", "2", "--max_completion_length", "16",
    )  # fmt: skip
    assert result["num_failed"] == 0
    assert result["usage"]["calls"] == sum(len(e.transitions) for e in episodes)
    assert len(episodes) == 2


def test_a_server_error_fails_only_its_episode(tmp_path, capsys):
    def reply(body, _):
        is_first = body["seed"] == first.get("seed", body["seed"])
        first.setdefault("seed", body["seed"])
        return refuses(400, "no") if is_first else says("<answer>x</answer>")

    first = {}
    with chat_server(reply) as server:
        result, episodes = measure(
            tmp_path, "--base_url", server.url, "--model", "m", "--num_tasks", "5"
        )
    assert result["num_failed"] == 1
    solved = sum(episode.success for episode in episodes)
    assert result["success_of_all"] == solved / 5
    assert result["metrics"]["success"] == solved / 4
    assert "1 of 5" in capsys.readouterr().out
    (failed,) = [episode for episode in episodes if episode.error]
    assert "status 400: no" in failed.error
