"""A real OpenAI-compatible server, ``transformers serve``, with the embedded policy on CPU."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_trainers import TINY_POLICY

START_SECONDS = 120
TEXT = {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}}


@dataclass(frozen=True)
class Served:
    """A server and the names of its models."""

    url: str
    native: str
    """The embedded policy; its calls are structured, both ways."""
    text: str
    """The same; its calls are text."""


def save_models(folder):
    """Save the embedded policy for the server, twice."""
    native, text = folder / "native", folder / "text"
    for model in (native, text):
        shutil.copytree(TINY_POLICY, model)
        edit(model / "generation_config.json", do_sample=True)  # unless temperature is 0
    settings = json.loads((text / "tokenizer_config.json").read_text(encoding="utf-8"))
    only_text = settings["response_template"] | {"fields": TEXT}
    edit(text / "tokenizer_config.json", response_template=only_text)
    return str(native), str(text)


def edit(path, **members):
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | members), encoding="utf-8")


@contextmanager
def transformers_serve(folder):
    """Serve models that are saved in `folder`."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package, reason=f"transformers serve needs {package}")
    port = free_port()
    program = Path(sys.executable).parent / "transformers"
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    native, text = save_models(folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with running(command, url, folder, environment, START_SECONDS):
        yield Served(f"{url}/v1", native, text)


@contextmanager
def running(command, url, folder, environment, seconds):
    """Run a server, whose log goes to `folder`, and wait until it is healthy."""
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            wait_until_ready(process, f"{url}/health", log, seconds)
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until_ready(process, url, log, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    pytest.fail(f"the server is not up after {seconds} seconds: {log}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
