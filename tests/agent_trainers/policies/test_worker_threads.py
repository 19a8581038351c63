"""Who leaves the processors to another thread lets its helpers go."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from agent_trainers import Gateway
from agent_trainers.policies.scripted import ScriptedPolicy
from agent_trainers.policies.worker_threads import release_worker_threads

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
