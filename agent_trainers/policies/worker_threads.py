"""The threads that help a thread with its matrix products, and how they are let go.

PyTorch shares a product among the threads of an OpenMP pool, of which each thread that computes has
one of its own, for good. While the pools together hold more threads than there are processors,
GNU's OpenMP has them sleep between two products instead of waiting awake (libgomp's manual,
GOMP_SPINCOUNT). A turn has hundreds of small products for each token, and all wait for the sleepers
each time: what one thread leaves behind slows another down.
"""

import contextlib
import ctypes
from typing import Final

_SOFT: Final = 1
"""`omp_pause_soft`: threads end, settings stay (OpenMP 5.0, section 3.2.44)."""


def release_worker_threads() -> None:
    """End the threads that helped the calling thread; its next product starts others.

    Does nothing where there is no OpenMP of version 5 or later.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        openmp = ctypes.CDLL(None)  # what this process has loaded: PyTorch loads it for all to see
        openmp.omp_pause_resource(_SOFT, openmp.omp_get_initial_device())
