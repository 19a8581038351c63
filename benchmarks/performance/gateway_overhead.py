"""What the gateway adds to a rollout: the same episodes in process, and by programs over HTTP.

Episodes of SyntheticMultiHop, all at once, with the same seeds on each side:

- ``rollout``: in process, the whole of ``Rollout.collect``;
- ``gateway``: by programs in another process, a thread for each, that write their requests
  themselves and so cost next to nothing;
- ``openai``: by the same programs around OpenAI's client, whose own time counts here, too.

The environments are the programs', as their tools are. Beside the seconds stand those that this
process spent on processors, policy and server together: they tell what the gateway costs also on a
machine that has other work.
"""

import argparse
import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
from openai import OpenAI

import agent_envs  # noqa: F401 - registers the environments
from agent_trainers import TINY_POLICY, Gateway, Rollout
from agent_trainers.cli.arguments import speaker
from agent_trainers.cli.environments import environment_maker, look_at
from agent_trainers.cli.models import fit_environment
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.models import find_model, load_tokenizer
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import EpisodeSpec
from agent_trainers.rollout.episode import template_tools
from agent_trainers.trajectory import Trajectory
from benchmarks.performance.comparison import compare, measure_in_turns

ENVIRONMENT: Final = "AgentR1/SyntheticMultiHop-v0"
TARGET: Final = 1.1
Complete = Callable[[dict[str, Any]], tuple[dict[str, Any], bool]]
"""Returns the model's message, and whether it was cut off."""


class Seconds(NamedTuple):
    """How long something took."""

    wall: float
    processor: float


class _Clock:
    """Measures its ``with`` block; `seconds` says it after."""

    seconds: Seconds

    def __enter__(self) -> Self:
        self._started = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        wall, processor = self._started
        self.seconds = Seconds(time.perf_counter() - wall, time.process_time() - processor)


def main() -> None:
    """Measure; print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", dest="num_episodes", type=int, default=64)
    parser.add_argument("--rounds", dest="num_rounds", type=int, default=9)
    parser.add_argument("--model", default=str(TINY_POLICY), help="folder; the embedded policy")
    parser.add_argument("--max_new_tokens", type=int, help="of a turn (48 for SmolLM2)")
    options = vars(parser.parse_args())
    print(json.dumps(measure(**options), indent=2))  # noqa: T201


def measure(
    *, model: str, max_new_tokens: int | None, num_episodes: int, num_rounds: int
) -> dict[str, Any]:
    """Return the seconds over HTTP over those in process, with each client."""
    policy = load_policy(model, max_new_tokens=max_new_tokens)
    tokenizer = load_tokenizer(find_model(model))
    look = look_at(environment_maker(ENVIRONMENT, {}), ENVIRONMENT)
    fitting = fit_environment(tokenizer, ENVIRONMENT, {}, look, speaker("gateway_overhead"))
    make = partial(gym.make, ENVIRONMENT, **fitting)
    rollout = Rollout(make, policy)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    programs = spawn.Process(target=_serve_programs, args=(there, make))
    programs.start()
    played: dict[str, list[Trajectory]] = {}

    def in_process() -> Seconds:
        specs = [
            EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng([0, i]))
            for i in range(num_episodes)
        ]
        with _Clock() as clock:
            played["rollout"] = rollout.collect(specs)
        return clock.seconds

    def through_gateway(client: str) -> Seconds:
        seconds, played[client] = _play_programs(policy, here, num_episodes, client)
        return seconds

    sides = {
        "gateway": lambda: through_gateway("gateway"),
        "openai": lambda: through_gateway("openai"),
        "rollout": in_process,
    }
    try:
        for side in sides.values():  # the first time is slower
            side()
        times = measure_in_turns(sides, num_rounds, description="gateway")
    finally:
        here.send(None)
        programs.join()
    sampled = [[[t.completion_ids for t in e.transitions] for e in p] for p in played.values()]
    if any(each != sampled[0] for each in sampled):
        raise RuntimeError("the episodes are not the same on all sides")
    num_calls = sum(len(episode.transitions) for episode in played["rollout"])
    facts = {"model": model, "episodes": num_episodes, "calls": num_calls}
    return facts | {
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


def _play_programs(
    policy: Policy, programs: Connection, num_episodes: int, client: str
) -> tuple[Seconds, list[Trajectory]]:
    with Gateway(policy) as gateway, _Clock() as clock:
        sessions = [gateway.open(task_id=str(i), seed=[0, i]) for i in range(num_episodes)]
        todo = [(session.base_url, session.key, i) for i, session in enumerate(sessions)]
        programs.send((client, todo))
        trajectories: list[Trajectory | None] = [None] * num_episodes
        for _ in sessions:
            number, reward, metrics = programs.recv()
            trajectories[number] = sessions[number].close(reward, metrics=metrics)
    return clock.seconds, [t for t in trajectories if t is not None]


def _serve_programs(orders: Connection, make: Callable[[], Any]) -> None:
    """Play what is ordered, until there is nothing more."""
    shared = OpenAI(base_url="http://unused", api_key="unused")
    envs: dict[int, Any] = {}
    lock = threading.Lock()

    def play(client: str, base_url: str, key: str, task: int) -> None:
        if client == "openai":
            complete = _openai_client(shared, base_url, key)
        else:
            complete = _plain_client(base_url, key)
        env = envs.setdefault(task, make())
        total, metrics = _play(env, task, complete)
        with lock:
            orders.send((task, total, metrics))

    while (order := orders.recv()) is not None:
        client, todo = order
        threads = [threading.Thread(target=play, args=[client, *each]) for each in todo]
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


def _play(env: Any, task: int, complete: Complete) -> tuple[float, dict[str, float]]:
    """Play an episode as a rollout does; return its return and metrics."""
    _, info = env.reset(seed=task, options={"task": task})
    messages = [dict(message) for message in info["messages"]]
    total, is_over = 0.0, False
    while not is_over:
        num_known = len(info["messages"]) + 1
        tools = template_tools(info) or []  # the others stand in the prompt
        message, is_cut = complete({"model": "policy", "messages": messages, "tools": tools})
        _, reward, terminated, truncated, info = env.step(_as_text(message))
        total, is_over = total + reward, terminated or truncated or is_cut
        messages.append(message)
        calls = list(message.get("tool_calls", ()))
        for said in info["messages"][num_known:]:
            if calls:
                call_id = calls.pop(0)["id"]
                said = {"role": "tool", "tool_call_id": call_id, "content": said["content"]}
            messages.append(said)
    return total, info["metrics"]


def _as_text(message: dict[str, Any]) -> str:
    calls = [
        {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
        for call in message.get("tool_calls", ())
    ]
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
    return "\n".join([message.get("content") or "", *written])


if __name__ == "__main__":
    main()
