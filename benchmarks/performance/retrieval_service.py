"""Load test of a retrieval server, first without and then with faults.

Clients in threads search over loopback, the second time through a proxy that drops, garbles and
delays requests while the server is stopped, killed and restarted. Each answer is compared with the
index itself.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from agent_envs.core.tool import ToolError
from agent_envs.retrieval import Corpus, Passage, RetrievalClient, SavedIndex, save_index
from benchmarks.performance.services import FaultyProxy, ServerProcess

TOP_K: Final = 5
SHARES: Final = {"drop": 0.02, "garbage": 0.02, "slow": 0.02}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Results of many searches."""

    asked: int
    """Searches of all clients."""
    right: int
    """Answers equal to those of the index."""
    wrong: int
    """Other answers."""
    unavailable: int
    """Searches that the client gave up."""
    seconds: float
    median_ms: float
    slowest_ms: float

    def __str__(self) -> str:
        """Describe it in a line."""
        return (
            f"{self.right:,} of {self.asked:,} answers right, {self.wrong} wrong, "
            f"{self.unavailable} given up; {self.asked / self.seconds:,.0f} requests/s, "
            f"median {self.median_ms:.1f} ms, slowest {self.slowest_ms:,.0f} ms"
        )


def make_index(folder: Path, num_passages: int, *, seed: int = 0) -> list[str]:
    """Save an index of synthetic passages; return queries for it."""
    rng = np.random.default_rng(seed)
    words = np.array([f"w{i}" for i in range(max(20, num_passages // 10))])
    texts = [" ".join(rng.choice(words, size=40)) for _ in range(num_passages)]
    save_index(Corpus(Passage(f"Page {i}", text) for i, text in enumerate(texts)), folder)
    return [" ".join(rng.choice(words, size=4)) for _ in range(max(50, num_passages // 10))]


def run_load(
    url: str, index: SavedIndex, queries: Sequence[str], *, clients: int, requests: int
) -> Load:
    """Search with many clients at once and compare each answer with that of `index`."""
    expected = {query: index.search(query, TOP_K) for query in queries}
    client = RetrievalClient(url)

    def search(query: str) -> tuple[str, float]:
        started = time.perf_counter()
        try:
            is_right = client.search(query, TOP_K) == expected[query]
            outcome = "right" if is_right else "wrong"
        except ToolError:
            outcome = "unavailable"
        return outcome, time.perf_counter() - started

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        asked = itertools.islice(itertools.cycle(queries), requests)
        outcomes, times = zip(*pool.map(search, asked), strict=True)
    return Load(
        asked=requests,
        right=outcomes.count("right"),
        wrong=outcomes.count("wrong"),
        unavailable=outcomes.count("unavailable"),
        seconds=time.perf_counter() - started,
        median_ms=float(np.median(times)) * 1e3,
        slowest_ms=max(times) * 1e3,
    )


@contextlib.contextmanager
def restarts(server: ServerProcess, *, every: float) -> Iterator[list[str]]:
    """Alternately stop and kill the server while the block runs, and restart it each time."""
    over, ways = threading.Event(), list[str]()

    def restart() -> None:
        while not over.wait(every):
            ways.append("killed" if len(ways) % 2 else "stopped")
            server.end(kill=ways[-1] == "killed")
            server.start()

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield ways
    finally:
        over.set()
        thread.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=5_000)
    parser.add_argument("--restart_every", type=float, default=5.0, help="seconds")
    options = parser.parse_args(arguments)
    size = {"clients": options.clients, "requests": options.requests}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index"
        queries = make_index(path, options.passages)
        index = SavedIndex(path)
        server = ServerProcess("agent_envs.retrieval", "serve", str(path))
        proxy = FaultyProxy(server.port, SHARES)
        with server.running():
            loads = {"without faults": run_load(server.url, index, queries, **size)}
            with proxy.running() as url, restarts(server, every=options.restart_every) as ways:
                loads["with faults"] = run_load(url, index, queries, **size)
    lines = [f"{name}: {load}" for name, load in loads.items()]
    lines.append(f"faults: {json.dumps({**proxy.counts, 'restarts': len(ways)})}")
    lines.append(json.dumps({name: asdict(load) for name, load in loads.items()}))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
