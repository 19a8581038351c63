"""OpenMP threads of PyTorch: limits for small models, and their release.

Each thread that computes has its own OpenMP pool. While all pools together have more threads than
there are processors, GNU's OpenMP lets them sleep between matrix products (libgomp manual,
GOMP_SPINCOUNT), which slows the hundreds of small products of a token. So a thread that stops
computing must release its pool.
"""

import contextlib
import ctypes
import os
from typing import Any, Final

import torch

_SOFT: Final = 1
"""`omp_pause_soft`: threads end, settings stay (OpenMP 5.0, section 3.2.44)."""
_SMALL: Final = 2_000_000
"""Parameters below which more threads do not speed up a model."""


def keep_to_one_thread(model: Any) -> None:
    """Compute a small model on a CPU with one thread, unless OMP_NUM_THREADS is set."""
    weights = list(model.parameters())
    is_small = sum(tensor.numel() for tensor in weights) < _SMALL
    on_cpu = all(tensor.device.type == "cpu" for tensor in weights)
    if is_small and on_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def release_worker_threads() -> None:
    """End the OpenMP pool of the calling thread; its next product starts another.

    Does nothing without OpenMP 5.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        openmp = ctypes.CDLL(None)  # PyTorch loads OpenMP globally
        openmp.omp_pause_resource(_SOFT, openmp.omp_get_initial_device())
