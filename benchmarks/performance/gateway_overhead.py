"""What the gateway adds to a rollout: the same episodes in process, and by programs over HTTP.

Episodes of SyntheticMultiHop with the embedded policy, all at once. *In process* is the whole of
``Rollout.collect``. *Through the gateway* are the same episodes with the same seeds, played by loops
around OpenAI's client in another process, a thread for each; the environments are theirs, as a
program's tools are.
"""

import argparse
import json
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym
import numpy as np

import agent_envs  # noqa: F401 - registers the environments
from agent_trainers import TINY_POLICY, Gateway, Rollout
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import EpisodeSpec
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.comparison import compare, measure_in_turns

ENVIRONMENT = "AgentR1/SyntheticMultiHop-v0"
TARGET = 1.1


def main() -> None:
    """Measure; print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default=str(TINY_POLICY))
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.episodes, options.rounds), indent=2))  # noqa: T201


def measure(model: str, num_episodes: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of both sides, and what they were made of."""
    policy = load_policy(model)
    rollout = Rollout(lambda: gym.make(ENVIRONMENT), policy)
    here, there = multiprocessing.get_context("spawn").Pipe()
    programs = multiprocessing.get_context("spawn").Process(target=_serve_programs, args=(there,))
    programs.start()
    played: dict[str, list[Trajectory]] = {}

    def in_process() -> float:
        specs = [
            EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng([0, i]))
            for i in range(num_episodes)
        ]
        started = time.perf_counter()
        played["rollout"] = rollout.collect(specs)
        return time.perf_counter() - started

    def through_gateway() -> float:
        seconds, played["gateway"] = _play_programs(policy, here, num_episodes)
        return seconds

    try:
        in_process()  # the first time is slower
        through_gateway()
        times = measure_in_turns(
            {"gateway": through_gateway, "rollout": in_process}, rounds, description="gateway"
        )
    finally:
        here.send(None)
        programs.join()
    sampled = [[[t.completion_ids for t in e.transitions] for e in p] for p in played.values()]
    if sampled[0] != sampled[1]:
        raise RuntimeError("the episodes are not the same on both sides")
    num_calls = sum(len(episode.transitions) for episode in played["rollout"])
    return compare(times["gateway"], times["rollout"], target=TARGET) | {
        "model": model, "episodes": num_episodes, "calls": num_calls,
    }  # fmt: skip


def _play_programs(
    policy: Policy, programs: Connection, num_episodes: int
) -> tuple[float, list[Trajectory]]:
    with Gateway(policy) as gateway:
        started = time.perf_counter()
        sessions = [gateway.open(task_id=str(i), seed=[0, i]) for i in range(num_episodes)]
        programs.send([(session.base_url, session.key, i) for i, session in enumerate(sessions)])
        trajectories: list[Trajectory | None] = [None] * num_episodes
        for _ in sessions:
            number, reward, metrics = programs.recv()
            trajectories[number] = sessions[number].close(reward, metrics=metrics)
        return time.perf_counter() - started, [t for t in trajectories if t is not None]


def _serve_programs(orders: Connection) -> None:
    """Play what is ordered, until there is nothing more."""
    from openai import OpenAI

    lock = threading.Lock()
    envs: dict[int, Any] = {}

    def play(base_url: str, key: str, task: int) -> None:
        env = envs.setdefault(task, gym.make(ENVIRONMENT))
        client = OpenAI(base_url=base_url, api_key=key, http_client=http)
        _, info = env.reset(seed=task, options={"task": task})
        messages = [dict(message) for message in info["messages"]]
        total, is_over = 0.0, False
        while not is_over:
            num_known = len(info["messages"]) + 1
            message = (
                client.chat.completions.create(
                    model="policy", messages=messages, tools=info["tools"]
                )
                .choices[0]
                .message
            )
            _, reward, terminated, truncated, info = env.step(_as_text(message))
            total, is_over = total + reward, terminated or truncated
            messages.append(message.model_dump(exclude_none=True))
            calls = list(message.tool_calls or ())
            for said in info["messages"][num_known:]:
                if calls:
                    said = {
                        "role": "tool",
                        "tool_call_id": calls.pop(0).id,
                        "content": said["content"],
                    }
                messages.append(said)
        with lock:
            orders.send((task, total, info["metrics"]))

    import httpx

    with httpx.Client(limits=httpx.Limits(max_connections=None)) as http:
        while (sessions := orders.recv()) is not None:
            threads = [threading.Thread(target=play, args=session) for session in sessions]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()


def _as_text(message: Any) -> str:
    calls = [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.tool_calls or ()
    ]
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    return "\n".join([message.content or "", *written])


if __name__ == "__main__":
    main()
