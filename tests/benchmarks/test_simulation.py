"""Real scheduling code in virtual time: closed forms of small cases."""

import gc

import pytest
import torch

pytest.importorskip("simpy")
pytest.importorskip("greenlet")

from benchmarks.performance import simulation
from benchmarks.performance.virtual_time import virtual_time


@pytest.fixture(autouse=True)
def checked_grad_mode():
    yield
    gc.collect()  # threads that are still waiting would end here
    assert torch.is_grad_enabled()


TURNS = {
    # forward passes take no time, an update 1 s; one tool call, then an answer, of a token each
    "passes": [[during, 1, 0.0] for during in (False, True) for _ in range(50)],
    "updates": [1.0],
    "episodes": [[[1, 0.0, True], [1, 0.0, False]]],
}
RUNS = {"sync": TURNS, "async": TURNS}
CASE = {"latency": 1.0, "steps": 20, "episodes": 8, "is_fast": True}


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("mode", "seconds", "staleness"),
    [
        # a call (1 s) after the update (1 s) of the step before; or during it, with older weights
        pytest.param(simulation.SYNC, 2.0, 0.0, id="sync"),
        pytest.param(simulation.ASYNC, 1.0, 0.5, id="async"),
    ],
)
def test_rollouts_ahead_overlap_with_updates(mode, seconds, staleness, processes):
    found = simulation.simulate(RUNS, CASE | mode | {"processes": processes})
    assert found["seconds_per_step"] == pytest.approx(seconds)
    assert found["utilisation"] == pytest.approx(1 / seconds)
    assert found["staleness"] == pytest.approx(staleness)


@pytest.mark.parametrize(("cores", "seconds"), [(1, 3.0), (2, 2.0), (None, 2.0)])
def test_processes_share_the_cores_of_a_machine(cores, seconds):
    found = simulation.simulate(RUNS, CASE | simulation.SYNC | {"processes": 2, "cores": cores})
    assert found["seconds_per_step"] == pytest.approx(seconds, rel=0.02)


def test_a_slow_call_delays_a_synchronous_step_and_not_one_that_runs_ahead():
    slow = CASE | {"is_fast": False, "steps": 100}
    behind = simulation.simulate(RUNS, slow | simulation.SYNC)["seconds_per_step"]
    # 8 calls of a step are among 20 of which one takes 20 s: 2 + 19 * 8 / 20 s
    assert behind == pytest.approx(2 + 19 * 8 / 20, rel=0.1)
    ahead = simulation.MODES["carried over"]
    assert simulation.simulate(RUNS, slow | ahead)["seconds_per_step"] < behind / 2


def test_a_failed_request_is_repeated_after_a_delay():
    recording = {"requests": [1.0], "turns": [2]}
    found = simulation.simulate_sessions(recording, sessions=20, rounds=2)
    assert 2.0 < found["seconds_per_session"] < 4.0


def test_errors_of_virtual_threads_are_raised_where_their_result_is_read():
    with virtual_time() as clock:

        def fail():
            clock.sleep(5.0)
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            clock.run(fail)
        assert clock.monotonic() == 5.0
