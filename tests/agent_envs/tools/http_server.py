"""A server at a port of this machine, in a process that can be killed and started again."""

import contextlib
import socket
import subprocess
import time


class HttpServer:
    """Runs a command to which it adds a free port."""

    def __init__(self, command):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [*command, str(self.port)]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command)
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            time.sleep(0.02)
        raise AssertionError(f"{self.command} ended")

    def kill(self):
        self.process.kill()
        self.process.wait()
