"""vLLM's engine and its server on a CPU; `make test-vllm` installs them."""

import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from agent_trainers import TINY_POLICY
from tests.served_model import free_port, running

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # tests run next to other programs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process of the test
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than the tests
}
if find_spec("vllm"):
    os.environ.update(SETTINGS)
START_SECONDS = 900
ENVIRONMENT = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # before an engine changes it
ENVIRONMENT.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
ON_CPU = ("--enforce-eager", "--no-enable-chunked-prefill")
CPU_WEIGHTS = (
    "--worker-extension-cls", "agent_trainers.policies.cpu_weights.GlooWorker",
    "--weight-transfer-config", '{"backend": "gloo"}',
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Allow for the time of vLLM's imports."""
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(1800))


@contextmanager
def vllm_serve(model, folder, *options):
    """Serve a model on a free port; yields the address."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "policy", "--port", str(port), "--max-model-len", "1024",
        "--dtype", "float32", "--logprobs-mode", "processed_logprobs", *ON_CPU, *options,
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with running(command, url, folder, ENVIRONMENT, START_SECONDS):
        yield url


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The embedded policy behind vLLM's server, which takes weights by gloo."""
    with vllm_serve(TINY_POLICY, tmp_path_factory.mktemp("server"), *CPU_WEIGHTS) as url:
        yield url
