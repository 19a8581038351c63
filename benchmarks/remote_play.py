"""Run episodes on servers that are killed meanwhile, and compare each with a local run.

``python -m benchmarks.remote_play --episodes 1000 --sessions 32 --kills 2``
"""

import argparse
import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from benchmarks.performance.services import ServerProcess

RESTART_SECONDS: Final = 1.0
"""Time between the kill of a server and its restart."""
MISTAKE: Final = "no action"


@dataclass(slots=True)
class Episode:
    """Actions of an episode, and the outputs of a local run."""

    seed: int
    actions: list[str]
    expected: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of all episodes."""

    episodes: int
    finished: int
    equal: int
    """Episodes byte for byte equal to a local run."""
    resumed: int
    """Sessions opened to replace one that had ended."""
    kills: int
    seconds: float
    errors: list[str]


def plan(env_id: str, kwargs: Mapping[str, Any], num_episodes: int) -> list[Episode]:
    """Run the episodes locally: a mistake, then the reference actions."""
    episodes = []
    with gym.make(env_id, **kwargs) as env:
        for seed in range(num_episodes):
            env.reset(seed=seed)
            actions = [MISTAKE, *env.unwrapped.reference_actions()]  # type: ignore[attr-defined]
            episodes.append(Episode(seed, actions, outputs_of(env, seed, actions)))
    return episodes


def outputs_of(env: gym.Env[str, str], seed: int, actions: Sequence[str]) -> list[str]:
    """Run an episode; return the outputs of reset and steps as JSON."""
    outputs = [json.dumps(env.reset(seed=seed))]
    for action in actions:
        outcome = env.step(action)
        outputs.append(json.dumps(outcome))
        if outcome[2] or outcome[3]:
            break
    return outputs


def measure(
    env_id: str,
    kwargs: Mapping[str, Any],
    *,
    num_episodes: int,
    num_sessions: int,
    num_servers: int = 2,
    kills: int = 2,
) -> Report:
    """Run the episodes on servers; kill and restart one `kills` times at regular intervals."""
    episodes = plan(env_id, kwargs, num_episodes)
    command = ["agent_envs", "serve", env_id, "--env_kwargs", json.dumps(kwargs)]
    servers = [ServerProcess(*command) for _ in range(num_servers)]
    victims = {
        num_episodes * (i + 1) // (kills + 1): servers[i % num_servers] for i in range(kills)
    }
    finished = equal = 0
    errors: list[str] = []
    with contextlib.ExitStack() as running, ThreadPoolExecutor(num_sessions) as pool:
        for server in servers:
            running.enter_context(server.running())
        urls = [server.url for server in servers]
        envs = [gym.make("AgentR1/Remote-v0", url=urls) for _ in range(num_sessions)]
        idle: queue.SimpleQueue[gym.Env[str, str]] = queue.SimpleQueue()
        for env in envs:
            idle.put(env)

        def run(episode: Episode) -> bool:
            env = idle.get()
            try:
                return outputs_of(env, episode.seed, episode.actions) == episode.expected
            finally:
                idle.put(env)

        started = time.perf_counter()
        futures = {pool.submit(run, episode): episode for episode in episodes}
        restarts = []
        for number, future in enumerate(as_completed(futures), start=1):
            try:
                equal += future.result()
                finished += 1
            except Exception as error:  # noqa: BLE001 - counted
                errors.append(f"seed {futures[future].seed}: {type(error).__name__}: {error}")
            if (victim := victims.get(number)) is not None:
                victim.end(kill=True)
                restarts.append(threading.Timer(RESTART_SECONDS, victim.start))
                restarts[-1].start()
        seconds = time.perf_counter() - started
        for restart in restarts:
            restart.join()
        sessions = sum(env.unwrapped.num_sessions for env in envs)  # type: ignore[attr-defined]
        for env in envs:
            env.close()
    return Report(
        num_episodes, finished, equal, sessions - num_sessions, len(restarts), seconds, errors
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", default="AgentR1/SyntheticMultiHop-v0")
    parser.add_argument("--env_kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2)
    options = parser.parse_args()
    report = measure(
        options.env, json.loads(options.env_kwargs), num_episodes=options.episodes,
        num_sessions=options.sessions, num_servers=options.servers, kills=options.kills,
    )  # fmt: skip
    lines = [
        f"{report.episodes} episodes, {options.sessions} sessions on {options.servers} servers, "
        f"{report.kills} killed and restarted, {report.resumed} sessions resumed elsewhere",
        f"finished {report.finished}, lost {report.episodes - report.finished}, "
        f"equal to a local run {report.equal}   ({report.seconds:.0f} seconds)",
    ]
    sys.stdout.write("\n".join([*lines, *report.errors]) + "\n")
    sys.exit(report.equal != report.episodes)


if __name__ == "__main__":
    main()
