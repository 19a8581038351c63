"""Play many episodes on servers that are killed meanwhile, and compare each with local play.

``python -m benchmarks.remote_play --episodes 1000 --sessions 32 --kills 2``
"""

import argparse
import contextlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from benchmarks.performance.server_process import ServerProcess

RESTART_SECONDS: Final = 1.0
"""How long a killed server stays away."""
MISTAKE: Final = "no action"


@dataclass(slots=True)
class Episode:
    """An episode as it is played, turn by turn."""

    seed: int
    actions: list[str]
    expected: list[str]
    """What local play shows after the reset and after each action."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it."""

    episodes: int
    finished: int
    equal: int
    """How many are byte for byte what local play gives."""
    resumed: int
    """How many sessions were opened in the place of one that had ended."""
    kills: int
    seconds: float
    errors: list[str]


def plan(env_id: str, kwargs: Mapping[str, Any], num_episodes: int) -> list[Episode]:
    """Play the episodes here: a mistake, then what solves the task."""
    episodes = []
    with gym.make(env_id, **kwargs) as env:
        for seed in range(num_episodes):
            env.reset(seed=seed)
            actions = [MISTAKE, *env.unwrapped.reference_actions()]  # type: ignore[attr-defined]
            episode = Episode(seed, actions, [])
            episode.expected = play(env, episode)
            episodes.append(episode)
    return episodes


def play(env: gym.Env[str, str], episode: Episode) -> list[str]:
    """Play an episode; return all it shows, as JSON."""
    shown = [json.dumps(env.reset(seed=episode.seed))]
    for action in episode.actions:
        outcome = env.step(action)
        shown.append(json.dumps(outcome))
        if outcome[2] or outcome[3]:
            break
    return shown


def measure(
    env_id: str,
    kwargs: Mapping[str, Any],
    *,
    num_episodes: int,
    num_sessions: int,
    num_servers: int = 2,
    kills: int = 2,
) -> Report:
    """Play on servers, kill one `kills` times at even distances, and restart it each time."""
    episodes = plan(env_id, kwargs, num_episodes)
    command = ["agent_envs", "serve", env_id, "--env_kwargs", json.dumps(kwargs)]
    servers = [ServerProcess(*command) for _ in range(num_servers)]
    with contextlib.ExitStack() as running:
        for server in servers:
            running.enter_context(server.running())
        started = time.perf_counter()
        counts, errors = _play_all(episodes, servers, num_sessions, kills)
        seconds = time.perf_counter() - started
    return Report(
        episodes=num_episodes, finished=counts["finished"], equal=counts["equal"],
        resumed=counts["sessions"] - num_sessions, kills=counts["kills"],
        seconds=seconds, errors=errors,
    )  # fmt: skip


def _play_all(
    episodes: Sequence[Episode], servers: Sequence[ServerProcess], num_sessions: int, kills: int
) -> tuple[Counter[str], list[str]]:
    waiting: queue.SimpleQueue[Episode] = queue.SimpleQueue()
    for episode in episodes:
        waiting.put(episode)
    ended: queue.SimpleQueue[tuple[Episode, list[str] | Exception]] = queue.SimpleQueue()
    envs = [
        gym.make("AgentR1/Remote-v0", url=[s.url for s in servers]) for _ in range(num_sessions)
    ]
    threads: list[threading.Thread] = [
        threading.Thread(target=_play_some, args=(env, waiting, ended), daemon=True) for env in envs
    ]
    for thread in threads:
        thread.start()
    counts: Counter[str] = Counter()
    errors: list[str] = []
    times = {
        len(episodes) * (i + 1) // (kills + 1): servers[i % len(servers)] for i in range(kills)
    }
    for number in range(1, len(episodes) + 1):
        episode, shown = ended.get()
        if isinstance(shown, Exception):
            errors.append(f"seed {episode.seed}: {type(shown).__name__}: {shown}")
        else:
            counts["finished"] += 1
            counts["equal"] += shown == episode.expected
        if number in times:
            counts["kills"] += 1
            times[number].end(kill=True)
            restart = threading.Timer(RESTART_SECONDS, times[number].start)
            restart.start()
            threads.append(restart)
    for thread in threads:
        thread.join()
    counts["sessions"] = sum(env.unwrapped.num_sessions for env in envs)  # type: ignore[attr-defined]
    for env in envs:
        env.close()
    return counts, errors


def _play_some(
    env: gym.Env[str, str],
    waiting: "queue.SimpleQueue[Episode]",
    ended: "queue.SimpleQueue[tuple[Episode, list[str] | Exception]]",
) -> None:
    while True:
        try:
            episode = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            ended.put((episode, play(env, episode)))
        except Exception as error:  # noqa: BLE001 - counted
            ended.put((episode, error))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Remote play, with servers that are killed.")
    parser.add_argument("--env", default="AgentR1/SyntheticMultiHop-v0")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=2, help="how often one is killed, restarted")
    options = parser.parse_args()
    report = measure(
        options.env, json.loads(options.kwargs), num_episodes=options.episodes,
        num_sessions=options.sessions, num_servers=options.servers, kills=options.kills,
    )  # fmt: skip
    print(  # noqa: T201
        f"{report.episodes} episodes, {options.sessions} sessions on {options.servers} servers, "
        f"{report.kills} killed and restarted, {report.resumed} sessions resumed elsewhere\n"
        f"finished {report.finished}, lost {report.episodes - report.finished}, "
        f"as in local play {report.equal}   ({report.seconds:.0f} seconds)"
    )
    for error in report.errors:
        print(error)  # noqa: T201
    sys.exit(report.equal != report.episodes)


if __name__ == "__main__":
    main()
