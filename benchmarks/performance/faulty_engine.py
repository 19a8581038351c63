"""A vLLM server that fails on purpose: ``python -m benchmarks.performance.faulty_engine``.

`FaultyEngine` speaks the protocol of vLLM's server: completions from and to token ids with
log-probabilities, the model list, health, and versions of the weights. It refuses requests, hangs,
sends half an answer, closes connections, and restarts. What it samples is a function of the prompt,
so a turn that got to another episode is found. The command runs sessions against it, all at once.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

import gymnasium as gym
import numpy as np
import psutil

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_trainers import TINY_POLICY, Rollout
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.models import load_tokenizer
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.rollout.collector import OnEnd
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

FAULTS: Final[Mapping[str, float]] = {
    "429": 0.02, "500": 0.02, "503": 0.01, "hang": 0.01, "half": 0.02, "reset": 0.02,
}  # fmt: skip
"""Share of the completions with each fault."""
VOCABULARY: Final = 200
TURN: Final = 8
END: Final = 3
_MIB: Final = 2**20
_ENV: Final = "AgentR1/SyntheticMultiHop-v0"


def turn_of(prompt: list[int]) -> tuple[list[int], list[float]]:
    """Return the tokens that the engine samples for a prompt, and their log-probabilities."""
    rng = np.random.default_rng(zlib.crc32(json.dumps(prompt).encode()))
    tokens = rng.integers(4, VOCABULARY, TURN - 1).tolist()
    return [*tokens, END], (-rng.random(TURN)).tolist()


class FaultyEngine:
    """A server on this machine, in a thread."""

    def __init__(
        self, faults: Mapping[str, float] = FAULTS, *, seconds: float = 0.01, seed: int = 0
    ) -> None:
        """Answer after `seconds`; `faults` are shares of the completions, by kind."""
        self._kinds, self._shares = ["", *faults], [1 - sum(faults.values()), *faults.values()]
        self._seconds, self._rng = seconds, np.random.default_rng(seed)
        self._loop = asyncio.new_event_loop()
        self._server: Any = None
        self.port, self.version = 0, "0"
        self.counts: Counter[str] = Counter()
        """Completions by the fault that each had, the empty one included, and restarts."""

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Serve for the duration of the block; yields the address."""
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        self._run(self._listen())
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    def restart(self, seconds: float) -> None:
        """Close the port and all connections, and listen again after `seconds`."""
        self.counts["restart"] += 1
        self._run(self._close())
        time.sleep(seconds)
        self._run(self._listen())

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = head.partition("content-length:")[2].partition("\r\n")[0]
                body = json.loads(await reader.readexactly(int(length or 0)) or b"{}")
                if not await self._answer(head.split()[1], body, writer):
                    break
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # a restart, or the client has gone
        finally:
            writer.transport.abort()

    async def _answer(self, path: str, body: Any, writer: asyncio.StreamWriter) -> bool:
        """Answer a request; return whether the connection stays open."""
        fault, status, reply = "", 200, self._reply(path, body)
        if path == "/v1/completions":
            fault = self._kinds[self._rng.choice(len(self._kinds), p=self._shares)]
            self.counts[fault] += 1
            await asyncio.sleep(self._seconds)
        if fault == "hang":
            await asyncio.sleep(3600)
        elif fault == "reset":
            return False
        elif fault.isdigit():
            status, reply = int(fault), {"error": {"message": "not now"}}
        text = json.dumps(reply).encode()
        head = f"HTTP/1.1 {status} Reply\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode())
        writer.write(text[: len(text) // 2] if fault == "half" else text)
        await writer.drain()
        return fault != "half"

    def _reply(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/v1/models":
            return {"data": [{"id": "policy", "object": "model", "max_model_len": 1024}]}
        if path == "/finish_weight_update":
            self.version = str(body.get("weight_version", self.version))
        if path != "/v1/completions":
            return {"weight_version": self.version}
        tokens, logprobs = turn_of(body["prompt"])
        choice = {
            "index": 0, "text": "", "finish_reason": "stop", "token_ids": tokens,
            "logprobs": {"token_logprobs": logprobs},
        }  # fmt: skip
        return {"id": "x", "object": "text_completion", "model": "policy", "choices": [choice]}


def run_sessions(
    url: str, number: int, *, timeout_seconds: float = 5.0, on_end: OnEnd | None = None
) -> list[Trajectory]:
    """Run `number` episodes at once on a server; `on_end` is that of `Rollout.collect`."""
    settings = SamplingSettings(max_new_tokens=TURN, eos_token_ids=(END,))
    renderer = ChatRenderer(load_tokenizer(str(TINY_POLICY)))
    options = {"max_concurrency": number, "timeout_seconds": timeout_seconds, "max_retries": 10}
    policy = VLLMServerPolicy(url, renderer, settings, **options)
    specs = [
        EpisodeSpec(task=i, seed=i, group_id=str(i), rng=np.random.default_rng(i))
        for i in range(number)
    ]
    with contextlib.closing(policy), contextlib.closing(Rollout(make_env, policy)) as rollout:
        return rollout.collect(specs, on_end)


def make_env() -> Any:
    """Make the environment of the sessions, whose prompts differ."""
    return gym.make(_ENV)


def count_errors(episodes: list[Trajectory]) -> tuple[int, int]:
    """Return how many episodes were lost, and how many turns are of another prompt."""
    steps = [step for episode in episodes for step in episode.transitions]
    wrong = [step for step in steps if list(step.completion_ids) != turn_of(step.prompt_ids)[0]]
    lost = [e for e in episodes if e.error is not None or not e.transitions]
    return len(lost), len(wrong)


def main() -> None:
    """Run rounds of sessions, each with a restart, and print counts, time and memory."""
    parser = CommandLineParser(description=__doc__)
    parser.add_argument("--sessions", type=positive_int, default=1000, help="Sessions at once.")
    parser.add_argument("--rounds", type=positive_int, default=3, help="Rounds of sessions.")
    options = parser.parse_args()
    engine, process = FaultyEngine(), psutil.Process(os.getpid())
    with engine.serving() as url:
        for number in range(options.rounds):
            started = time.monotonic()
            restart = threading.Timer(2.0, engine.restart, [1.0])
            restart.start()
            episodes = run_sessions(url, options.sessions)
            restart.join()
            lost, mixed = count_errors(episodes)
            row = {
                "round": number, "sessions": len(episodes), "lost": lost, "mixed": mixed,
                "turns": sum(len(episode.transitions) for episode in episodes),
                "seconds": round(time.monotonic() - started, 1),
                "memory_mib": process.memory_info().rss // _MIB, **engine.counts,
            }  # fmt: skip
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
