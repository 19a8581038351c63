"""Evaluation against a real server: ``transformers serve`` with the embedded policy, on CPU."""

import json

import pytest

from agent_trainers.cli import evaluate
from agent_trainers.trajectory import load_trajectories
from tests.agent_trainers.chat_server import chat_server, refuses, says


def measure(tmp_path, *options):
    """Run agent-r1-eval; return what it wrote."""
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
    pytest.importorskip("openai", reason="the extra openai is not installed")

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
