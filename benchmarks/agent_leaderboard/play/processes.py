"""Do independent pieces of work in several processes."""

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Job], Result],
    jobs: Sequence[Job],
    processes: int,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield number and result of each job, as they are done; 1 process is this one, in order.

    Each process that is started calls `prepare` first.
    """
    if processes == 1 or len(jobs) < 2:
        for number, job in enumerate(jobs):
            yield number, function(job)
        return
    with _one_thread_each():
        context = multiprocessing.get_context("spawn")  # forking a process with threads is unsafe
        pool = ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(prepare,)
        )
        try:
            futures: dict[Future[Result], int] = {
                pool.submit(function, job): number for number, job in enumerate(jobs)
            }
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(prepare: Callable[[], None] | None) -> None:
    """Let this process end when the one that started it is gone, however it ended."""
    if prepare is not None:
        prepare()
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Let processes that are started compute on one thread: there are as many as cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
