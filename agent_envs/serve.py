"""Serve an environment: ``python -m agent_envs.serve AgentR1/SyntheticMultiHop-v0``."""

import argparse
import ipaddress
import os
from collections.abc import Sequence

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.command_line import errors_of_one_line, json_object
from agent_envs.core.lookup import require_extra
from agent_envs.errors import ConfigurationError
from agent_envs.remote.protocol import TOKEN_VARIABLE


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; it serves until it is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m agent_envs.serve",
        description="Serve an environment over OpenEnv's protocol, for AgentR1/Remote-v0 and "
        "OpenEnv's clients.",
    )
    parser.add_argument("env", help="Gymnasium id, with its module if it is yours: my_envs:Mine-v0")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this "
                        "machine alone)")  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="port; 0 for a free one")
    parser.add_argument(
        "--max-sessions", type=int, default=256, help="episodes at a time (default: 256)"
    )
    parser.add_argument("--idle-timeout", type=float, default=600.0,
                        help="seconds without a message after which a session ends "
                        "(default: 600)")  # fmt: skip
    parser.add_argument("--token", default=os.environ.get(TOKEN_VARIABLE),
                        help=f"what clients have to send; better given as {TOKEN_VARIABLE}, which "
                        "other users of the machine do not see")  # fmt: skip
    parser.add_argument("--reference", action="store_true",
                        help="let clients ask for the actions that solve a task")  # fmt: skip
    options = parser.parse_args(arguments)
    with errors_of_one_line("serve"):
        _serve(options)


def _serve(options: argparse.Namespace) -> None:
    modules = ("starlette", "uvicorn", "websockets")
    require_extra("serve", "Serving environments", *modules)
    from agent_envs.remote.server import EnvironmentServer, listen

    kwargs = json_object(options.kwargs, "--kwargs")
    if options.max_sessions < 1 or options.idle_timeout <= 0:
        raise ConfigurationError("--max-sessions and --idle-timeout must be positive.")
    if not options.token and not _is_loopback(options.host):
        raise ConfigurationError(
            f"--host {options.host} lets other machines in. Set {TOKEN_VARIABLE} to a secret, here "
            "and where the clients run."
        )
    server = EnvironmentServer(
        lambda: gym.make(options.env, **kwargs),
        max_sessions=options.max_sessions,
        idle_seconds=options.idle_timeout,
        token=options.token or None,
        with_reference=options.reference,
    )
    listener, socket, url = listen(server, options.host, options.port)
    what = server.description["environment"]
    print(f"Serving {what} at {url} ({options.max_sessions} sessions)", flush=True)  # noqa: T201
    listener.run(sockets=[socket])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    main()
