import contextvars
import multiprocessing
import os
import sys
import threading
import time

import pytest

from agent_envs.core.deadline import CallSession, call_with_deadline


def test_calls_run_side_by_side_and_are_reported_as_they_end():
    session = CallSession()
    for key, seconds in ((0, 0.3), (1, 0.01), (2, 0.1)):
        session.submit(key, lambda seconds=seconds: time.sleep(seconds) or seconds)
    reported = []
    while session:
        reported += [(outcome.key, outcome.value) for outcome in session.wait(1.0)]
    assert reported == [(1, 0.01), (2, 0.1), (0, 0.3)]


def test_what_a_call_raises_is_its_outcome_even_an_exit():
    def leave():
        raise SystemExit(3)

    session = CallSession()
    session.submit(0, leave)
    (outcome,) = session.wait(5.0)
    assert isinstance(outcome.error, SystemExit)
    assert outcome.value is None


def test_a_call_that_hangs_is_given_up_at_its_own_deadline():
    session = CallSession()
    never = threading.Event()
    session.submit(0, never.wait, timeout=0.2)
    session.submit(1, lambda: "done", timeout=0.2)
    started = time.monotonic()
    outcomes = []
    while session:
        outcomes += session.wait(5.0)
    assert time.monotonic() - started < 2.0
    assert [outcome.key for outcome in outcomes] == [1, 0]
    assert isinstance(outcomes[1].error, TimeoutError)
    assert "0.2 seconds" in str(outcomes[1].error)
    never.set()


def test_an_outcome_that_comes_after_its_call_was_given_up_is_not_reported():
    session = CallSession()
    gate = threading.Event()
    session.submit(0, gate.wait, timeout=0.05)
    assert isinstance(session.wait(5.0)[0].error, TimeoutError)
    gate.set()
    time.sleep(0.05)
    session.submit(0, lambda: "second")
    assert [outcome.value for outcome in session.wait(5.0)] == ["second"]


def test_waiting_for_nothing_returns_at_once():
    started = time.monotonic()
    assert CallSession().wait(5.0) == []
    assert time.monotonic() - started < 1.0


def test_threads_end_with_their_calls():
    before = threading.active_count()
    for _ in range(20):
        session = CallSession()
        session.submit(0, lambda: None)
        session.wait(5.0)
    assert threading.active_count() - before <= 2


def test_a_call_that_ended_in_time_counts_however_late_somebody_looks():
    session = CallSession()
    session.submit(1, lambda: "done", timeout=0.05)
    time.sleep(0.3)  # as long as a policy may take to generate
    (outcome,) = session.wait(1.0)
    assert outcome.value == "done"
    assert outcome.error is None


def test_calls_one_after_the_other_share_a_thread_and_nothing_else():
    seen = contextvars.ContextVar("seen", default="nothing")
    threads = set()

    def call():
        threads.add(threading.current_thread())
        before = seen.get()
        seen.set("the last call")
        return before

    for _ in range(20):
        assert call_with_deadline(call, 5.0) == "nothing"
    assert len(threads) < 10


def test_a_thread_whose_call_hangs_holds_up_no_other_call():
    gate = threading.Event()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            call_with_deadline(gate.wait, 0.02)
    assert call_with_deadline(lambda: "done", 5.0) == "done"
    gate.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
def test_a_forked_process_does_not_wait_for_its_parents_threads():
    call_with_deadline(lambda: None, 5.0)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: sys.exit(call_with_deadline(lambda: 7, 5.0))
    )
    child.start()
    child.join(20.0)
    assert child.exitcode == 7
