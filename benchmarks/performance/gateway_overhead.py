"""Overhead of the gateway: the same episodes in process, and by programs over HTTP.

- ``rollout``: in process, the whole of ``Rollout.collect``;
- ``gateway``: by programs in another process, a thread each, with a minimal HTTP client;
- ``openai``: by the same programs with OpenAI's client, whose own time counts.

The processor seconds of this process (policy and server) are compared as well: they hold on a busy
machine.
"""

import argparse
import http.client
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
from openai import OpenAI

import agent_envs  # noqa: F401 - registers the environments
from agent_trainers import TINY_POLICY, Gateway, Rollout
from agent_trainers.cli.arguments import notifier
from agent_trainers.cli.environments import environment_maker, inspect_environment
from agent_trainers.cli.models import fit_environment
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.environments import template_tools
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.interleaved import compare, measure_interleaved
from benchmarks.performance.models import ENVIRONMENT

TARGET: Final = 1.1
Complete = Callable[[dict[str, Any]], tuple[dict[str, Any], bool]]
"""Returns the model's message, and whether it was truncated."""


class Seconds(NamedTuple):
    """Wall-clock and processor time."""

    wall: float
    processor: float


def measure(
    *, model: str, max_new_tokens: int | None, num_episodes: int, num_rounds: int
) -> dict[str, Any]:
    """Return the seconds over HTTP over those in process, with each client."""
    policy = load_policy(model, max_new_tokens=max_new_tokens)
    tokenizer = load_tokenizer(find_model(model))
    facts = inspect_environment(environment_maker(ENVIRONMENT, {}), ENVIRONMENT)
    fitting = fit_environment(tokenizer, ENVIRONMENT, {}, facts, notifier("gateway_overhead"))
    make = partial(gym.make, ENVIRONMENT, **fitting)
    rollout = Rollout(make, policy)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    programs = spawn.Process(target=_serve_programs, args=(there, make))
    programs.start()
    collected: dict[str, list[Trajectory]] = {}

    def in_process() -> Seconds:
        specs = [
            EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng([0, i]))
            for i in range(num_episodes)
        ]
        started = _now()
        collected["rollout"] = rollout.collect(specs)
        return _since(started)

    def through_gateway(client: str) -> Seconds:
        seconds, collected[client] = _run_programs(policy, here, num_episodes, client)
        return seconds

    sides = {
        "gateway": lambda: through_gateway("gateway"),
        "openai": lambda: through_gateway("openai"),
        "rollout": in_process,
    }
    try:
        for side in sides.values():  # warm-up
            side()
        times = measure_interleaved(sides, num_rounds, description="gateway")
    finally:
        here.send(None)
        programs.join()
    sampled = [[[t.completion_ids for t in e.transitions] for e in c] for c in collected.values()]
    if any(each != sampled[0] for each in sampled):
        raise RuntimeError("the episodes of the sides differ")
    num_calls = sum(len(episode.transitions) for episode in collected["rollout"])
    return {"model": model, "episodes": num_episodes, "calls": num_calls} | {
        name: {
            kind: compare(
                [getattr(seconds, kind) for seconds in times[name]],
                [getattr(seconds, kind) for seconds in times["rollout"]],
                target=TARGET,
            )
            for kind in Seconds._fields
        }
        for name in ("gateway", "openai")
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", dest="num_episodes", type=int, default=64)
    parser.add_argument("--rounds", dest="num_rounds", type=int, default=9)
    parser.add_argument("--model", default=str(TINY_POLICY), help="default: the embedded policy")
    parser.add_argument("--max_new_tokens", type=int, help="of a turn (48 for SmolLM2)")
    sys.stdout.write(json.dumps(measure(**vars(parser.parse_args())), indent=2) + "\n")


def _now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def _since(started: Seconds) -> Seconds:
    return Seconds(*(now - before for now, before in zip(_now(), started, strict=True)))


def _run_programs(
    policy: Policy, programs: Connection, num_episodes: int, client: str
) -> tuple[Seconds, list[Trajectory]]:
    started = _now()
    with Gateway(policy) as gateway:
        sessions = [gateway.open(task_id=str(i), seed=[0, i]) for i in range(num_episodes)]
        orders = [(session.base_url, session.key, i) for i, session in enumerate(sessions)]
        programs.send((client, orders))
        trajectories: dict[int, Trajectory] = {}
        for _ in sessions:
            number, reward, metrics = programs.recv()
            trajectories[number] = sessions[number].close(reward, metrics=metrics)
    return _since(started), [trajectories[i] for i in range(num_episodes)]


def _serve_programs(orders: Connection, make: Callable[[], Any]) -> None:
    """Run the ordered episodes until None is received."""
    shared = OpenAI(base_url="http://unused", api_key="unused")
    envs: dict[int, Any] = {}
    lock = threading.Lock()

    def run(client: str, base_url: str, key: str, task: int) -> None:
        if client == "openai":
            complete = _openai_client(shared, base_url, key)
        else:
            complete = _plain_client(base_url, key)
        outcome = _run_episode(envs.setdefault(task, make()), task, complete)
        with lock:
            orders.send((task, *outcome))

    while (order := orders.recv()) is not None:
        client, todo = order
        threads = [threading.Thread(target=run, args=[client, *each]) for each in todo]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _openai_client(shared: OpenAI, base_url: str, key: str) -> Complete:
    client = shared.with_options(base_url=base_url, api_key=key)

    def complete(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        choice = client.chat.completions.create(**body).choices[0]
        return choice.message.model_dump(exclude_none=True), choice.finish_reason == "length"

    return complete


def _plain_client(base_url: str, key: str) -> Complete:
    url = urlsplit(base_url)
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def complete(body: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
        choice = json.loads(connection.getresponse().read())["choices"][0]
        return choice["message"], choice["finish_reason"] == "length"

    return complete


def _run_episode(env: Any, task: int, complete: Complete) -> tuple[float, dict[str, float]]:
    """Run an episode like a rollout; return its return and metrics."""
    _, info = env.reset(seed=task, options={"task": task})
    messages = [dict(message) for message in info["messages"]]
    total, is_over = 0.0, False
    while not is_over:
        num_known = len(info["messages"]) + 1
        tools = template_tools(info) or []
        message, is_cut = complete({"model": "policy", "messages": messages, "tools": tools})
        calls = list(message.get("tool_calls", ()))
        _, reward, terminated, truncated, info = env.step(_as_text(message, calls))
        total, is_over = total + reward, terminated or truncated or is_cut
        messages.append(message)
        for added in info["messages"][num_known:]:
            if calls:
                call_id = calls.pop(0)["id"]
                added = {"role": "tool", "tool_call_id": call_id, "content": added["content"]}
            messages.append(added)
    return total, info["metrics"]


def _as_text(message: dict[str, Any], calls: list[dict[str, Any]]) -> str:
    functions = [call["function"] for call in calls]
    written = [
        {"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions
    ]
    blocks = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in written]
    return "\n".join([message.get("content") or "", *blocks])


if __name__ == "__main__":
    main()
