"""Step and reset times of peers' environments whose tool does nothing, in microseconds.

A script without imports of this repository: `benchmarks.performance.environments` runs it in the
virtual environment of the peers, and uses its timer for our environment.
"""

# mypy: disable-error-code="import-not-found"

import contextlib
import importlib.metadata
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

TURNS = (1, 10, 100, 1000)
FIGURES = ("reset", *(f"turn {turn}" for turn in TURNS))
PEERS = ("gem-llm", "skyrl-gym", "openenv-core")


def time_steps(
    reset: Callable[[], object], step: Callable[[], object], rounds: int
) -> dict[str, float]:
    """Return medians over `rounds` episodes: of the reset, and of the step at each of `TURNS`."""
    seconds: dict[str, list[float]] = {name: [] for name in FIGURES}
    for number in range(rounds + 1):
        taken = {"reset": _seconds(reset)}
        for turn in range(1, max(TURNS) + 1):
            taken[f"turn {turn}"] = _seconds(step)
        for name in seconds if number else ():  # the first episode warms up
            seconds[name].append(taken[name])
    return {name: statistics.median(values) * 1e6 for name, values in seconds.items()}


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def gem(rounds: int) -> dict[str, float]:
    """Time GEM's tool wrapper around an environment with one question."""
    from gem.core import Env
    from gem.tools.base_tool import BaseTool
    from gem.tools.tool_env_wrapper import ToolEnvWrapper

    class Question(Env):  # type: ignore[misc]
        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            return "Where?", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 0.0, True, True, {}

    class Search(BaseTool):  # type: ignore[misc]
        def instruction_string(self) -> str:
            return "Search with <search>...</search>."

        def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
            return "<search>" in action, False, "nothing", action

    env = ToolEnvWrapper(Question(), [Search()], max_tool_uses=None)
    return time_steps(env.reset, lambda: env.step("<search>x</search>"), rounds)


def skyrl(rounds: int) -> dict[str, float]:
    """Time skyrl-gym's search environment; it has no reset, so a reset is a new object."""
    from skyrl_gym.envs.search.env import SearchEnv, SearchEnvConfig

    env: Any = None

    def reset() -> None:
        nonlocal env
        extras = {"reward_spec": {"ground_truth": ["x"]}, "max_turns": 10**9}
        env = SearchEnv(SearchEnvConfig(), extras)
        env._execute_tool = lambda *arguments: "nothing"
        env.init([{"role": "user", "content": "Where?"}])

    return time_steps(reset, lambda: env.step("<search>x</search>"), rounds)


def openenv(rounds: int) -> dict[str, float]:
    """Time an OpenEnv client with a server in the same process."""
    from openenv.core.generic_client import GenericEnvClient

    with _openenv_server() as url, GenericEnvClient(base_url=url).sync() as client:
        return time_steps(client.reset, lambda: client.step({"query": "x"}), rounds)


@contextlib.contextmanager
def _openenv_server() -> Iterator[str]:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Query(Action):  # type: ignore[misc]
        query: str

    class Found(Observation):  # type: ignore[misc]
        text: str

    class Search(Environment):  # type: ignore[misc]
        def reset(self, *arguments: Any, **options: Any) -> Found:
            return Found(text="Where?", done=False, reward=0.0)

        def step(self, action: Query, *arguments: Any, **options: Any) -> Found:
            return Found(text="nothing", done=False, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Search, Query, Found)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def main() -> None:
    """Print JSON: peer -> its version and figures, or why it is missing."""
    rounds = int(sys.argv[1])
    results: dict[str, Any] = {}
    for name, measure in zip(PEERS, (gem, skyrl, openenv), strict=True):
        try:
            results[name] = {"version": importlib.metadata.version(name), **measure(rounds)}
        except ImportError as error:
            results[name] = {"missing": str(error)}
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main()
