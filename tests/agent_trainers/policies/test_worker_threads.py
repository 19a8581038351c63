"""A thread that stops computing releases its OpenMP threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from agent_trainers import TINY_POLICY, Gateway
from agent_trainers.policies.models import load_model
from agent_trainers.policies.policy import ScriptedPolicy
from agent_trainers.policies.worker_threads import keep_to_one_thread

THREADS = Path("/proc/self/task")


def multiply():
    """Return the threads that a matrix product starts."""
    before = {path.name for path in THREADS.iterdir()}
    torch.ones(512, 512) @ torch.ones(512, 512)
    return {path.name for path in THREADS.iterdir()} - before


@pytest.mark.skipif(not THREADS.is_dir(), reason="needs Linux's list of threads")
def test_a_gateway_releases_the_threads_of_the_thread_that_opens_it():
    num_threads = torch.get_num_threads()
    gateway = Gateway(ScriptedPolicy(lambda request: "yes"))
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch.set_num_threads, 2).result()
        (helper,) = thread.submit(multiply).result()
        thread.submit(gateway.__enter__).result()
        try:
            assert not (THREADS / helper).exists()
            assert len(thread.submit(multiply).result()) == 1
        finally:
            gateway.__exit__(None, None, None)
            thread.submit(torch.set_num_threads, num_threads).result()


def test_a_small_model_computes_in_one_thread_unless_configured(monkeypatch):
    before = torch.get_num_threads()
    model = load_model(str(TINY_POLICY))
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        keep_to_one_thread(model)
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        keep_to_one_thread(model)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
