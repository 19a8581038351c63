"""Who leaves the processors to another thread lets its helpers go."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from agent_trainers import TINY_POLICY, Gateway
from agent_trainers.policies.models import load_model
from agent_trainers.policies.scripted import ScriptedPolicy
from agent_trainers.policies.worker_threads import keep_to_one_thread, release_worker_threads

THREADS = Path("/proc/self/task")


def multiply():
    """Return the threads that a product started."""
    before = {path.name for path in THREADS.iterdir()}
    torch.ones(512, 512) @ torch.ones(512, 512)
    return {path.name for path in THREADS.iterdir()} - before


@pytest.fixture
def thread():
    """A thread that has not computed yet, and computes with one more."""
    if not THREADS.is_dir():
        pytest.skip("needs Linux's list of threads")
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(torch.set_num_threads, 2).result()
        yield executor
        executor.submit(torch.set_num_threads, num_threads).result()
    torch.set_num_threads(num_threads)


def test_worker_threads_end_and_come_again(thread):
    (helper,) = thread.submit(multiply).result()
    thread.submit(release_worker_threads).result()
    assert not (THREADS / helper).exists()
    assert len(thread.submit(multiply).result()) == 1


def test_a_gateway_lets_go_the_helpers_of_who_opens_it(thread):
    (helper,) = thread.submit(multiply).result()
    with_gateway = Gateway(ScriptedPolicy(lambda request: "yes"))
    thread.submit(with_gateway.__enter__).result()
    try:
        assert not (THREADS / helper).exists()
    finally:
        with_gateway.__exit__(None, None, None)


def test_a_small_model_computes_in_one_thread_unless_told(monkeypatch):
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
