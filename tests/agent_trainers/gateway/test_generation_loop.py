"""Which calls are sampled together."""

import threading
import time

import numpy as np
import pytest

from agent_trainers.gateway import generation_loop
from agent_trainers.gateway.generation_loop import GenerationLoop
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.scripted import ScriptedPolicy
from agent_trainers.policies.streams import WaveStream


class SlotsPolicy(ScriptedPolicy):
    """Answers whoever is there, as a stream with slots does; notes how many began together."""

    def __init__(self):
        super().__init__(lambda request: "yes")
        self.batch_sizes = []

    def open_stream(self):
        return Slots(self._answer)

    def _answer(self, requests):
        self.batch_sizes.append(len(requests))
        return [Generation(text="yes") for _ in requests]


class Slots(WaveStream):
    gathers = False


@pytest.fixture
def serve(monkeypatch):
    """Runs the loop of a policy; calls that end a pause wait for others for so many seconds."""
    is_over = threading.Event()
    threads = []

    def run(policy, *, num_sessions, together_seconds):
        monkeypatch.setattr(generation_loop, "_TOGETHER_SECONDS", together_seconds)
        loop = GenerationLoop(policy, lambda: num_sessions)
        threads.append(threading.Thread(target=loop.run, args=[lambda: not is_over.is_set()]))
        threads[-1].start()
        return loop

    yield run
    is_over.set()
    for thread in threads:
        thread.join()


def request():
    user = {"role": "user", "content": "hello"}
    rng = np.random.default_rng(0)
    return GenerationRequest(episode_id=0, messages=[user], tools=None, previous=None, rng=rng)


def test_calls_of_several_sessions_after_a_pause_begin_together(serve):
    policy = SlotsPolicy()
    loop = serve(policy, num_sessions=2, together_seconds=30)
    calls = [loop.submit(0, request())]
    time.sleep(0.02)
    calls.append(loop.submit(1, request()))
    assert [call.result(10).text for call in calls] == ["yes", "yes"]
    assert policy.batch_sizes == [2]


def test_the_call_of_the_only_session_waits_for_nobody(serve):
    loop = serve(SlotsPolicy(), num_sessions=1, together_seconds=30)
    assert loop.submit(0, request()).result(10).text == "yes"
