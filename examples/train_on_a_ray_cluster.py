"""Environment servers and a training run on a Ray cluster, each where Ray puts it.

    pip install ray '.[serve,train]'        # in a checkout, on every machine of the cluster
    python examples/train_on_a_ray_cluster.py --servers 4 --env AgentR1/SyntheticMultiHop-v0 \
        --num_gpus 1 -- --max_steps 200 --output_dir /shared/runs/on-ray

What follows ``--`` goes to ``agent-r1-train``. Without a cluster, Ray starts one on this machine.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import threading
from typing import Any

import gymnasium as gym

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.remote.protocol import TOKEN_VARIABLE
from agent_envs.remote.server import EnvironmentServer, listen

try:
    import ray
except ModuleNotFoundError:
    sys.exit("This example needs Ray: pip install ray")


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD", max_restarts=-1)
class Server:
    """An environment server on a machine that Ray chooses; Ray restarts it when it dies.

    If it restarts on another machine, its URL changes, and the other servers take its episodes.
    """

    def __init__(self, env_id: str, kwargs: dict[str, Any], port: int) -> None:
        """Start serving at `port`."""
        server = EnvironmentServer(
            lambda: gym.make(env_id, **kwargs),
            token=os.environ[TOKEN_VARIABLE],
        )
        listener, socket, self.url = listen(server, ray.util.get_node_ip_address(), port)
        threading.Thread(target=listener.run, args=([socket],), daemon=True).start()

    def where(self) -> str:
        """Return the URL."""
        return self.url


@ray.remote
def train(urls: list[str], arguments: list[str]) -> None:
    """Run ``agent-r1-train`` on the machine with the GPUs."""
    command = [sys.executable, "-m", "agent_trainers.cli.train", "--env", "AgentR1/Remote-v0"]
    command += ["--env_kwargs", json.dumps({"url": urls}), *arguments]
    subprocess.run(command, check=True)  # noqa: S603 - our own command


def main() -> None:
    """Place the servers, and train."""
    parser = argparse.ArgumentParser(description="Train on a Ray cluster.")
    parser.add_argument("--env", default="AgentR1/SyntheticMultiHop-v0")
    parser.add_argument("--env_kwargs", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--first_port", type=int, default=8700, help="each server has its own")
    parser.add_argument("--num_gpus", type=int, default=0, help="of the training run")
    parser.add_argument("arguments", nargs="*", help="of agent-r1-train, after --")
    options = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex()
    ray.init(runtime_env={"env_vars": {TOKEN_VARIABLE: token}})
    ports = range(options.first_port, options.first_port + options.servers)
    servers = [Server.remote(options.env, options.env_kwargs, port) for port in ports]
    urls = ray.get([server.where.remote() for server in servers])
    print("\n".join(urls))
    ray.get(train.options(num_gpus=options.num_gpus).remote(urls, options.arguments))


if __name__ == "__main__":
    main()
