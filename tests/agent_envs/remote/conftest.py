"""Servers in threads of this process, on loopback."""

import contextlib
import threading

import gymnasium as gym
import pytest

import agent_envs  # noqa: F401 - registers the environments


class Served:
    """A server that runs until it is stopped, and can be started again at the same port."""

    def __init__(self, make_env, port=0, **options):
        from agent_envs.remote.server import EnvironmentServer

        self.make_env, self.port = make_env, port
        self.options = {"with_reference": True, **options}
        self.server = EnvironmentServer(make_env, **self.options)
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        from agent_envs.remote.server import listen

        self.uvicorn, socket, _ = listen(self.server, "127.0.0.1", self.port)
        self.uvicorn.config.timeout_graceful_shutdown = 1
        self.port = socket.getsockname()[1]
        self.thread = threading.Thread(target=self.uvicorn.run, args=([socket],), daemon=True)
        self.thread.start()

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join()

    def restart(self):
        """Forget all sessions, as a new process would."""
        from agent_envs.remote.server import EnvironmentServer

        self.stop()
        self.server = EnvironmentServer(self.make_env, **self.options)
        self.start()

    @property
    def num_open(self):
        return len(self.server._sessions)


@pytest.fixture
def serve():
    """Starts a server of an id, or of a function that makes an environment."""
    with contextlib.ExitStack() as stack:

        def start(make_env, kwargs=None, **options):
            if isinstance(make_env, str):
                env_id = make_env
                make_env = lambda: gym.make(env_id, **kwargs or {})  # noqa: E731
            served = Served(make_env, **options)
            stack.callback(served.stop)
            return served

        yield start


@pytest.fixture
def remote():
    """Makes remote environments, which are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(*servers, **kwargs):
            urls = [getattr(server, "url", server) for server in servers]
            return stack.enter_context(gym.make("AgentR1/Remote-v0", url=urls, **kwargs))

        yield make
