"""The threads that help a thread with its matrix products, and how they are let go.

PyTorch shares a product among the threads of an OpenMP pool, of which each thread that computes has
one of its own, for good. While the pools together hold more threads than there are processors,
GNU's OpenMP has them sleep between two products instead of waiting awake (libgomp's manual,
GOMP_SPINCOUNT). A turn has hundreds of small products for each token, and all wait for the sleepers
each time: what one thread leaves behind slows another down.
"""

import contextlib
import ctypes
import os
from typing import Any, Final

import torch

_SOFT: Final = 1
"""`omp_pause_soft`: threads end, settings stay (OpenMP 5.0, section 3.2.44)."""
_SMALL: Final = 2_000_000
"""Parameters of a model whose products are done before other threads have woken up."""


def keep_to_one_thread(model: Any) -> None:
    """Let nobody help with a model as small as the embedded policy, unless OMP_NUM_THREADS says so.

    Helpers gain it nothing, and where another program holds one of their processors, every
    product waits for the one that is late, and a run takes many times as long.
    """
    weights = list(model.parameters())
    is_small = sum(tensor.numel() for tensor in weights) < _SMALL
    on_cpu = all(tensor.device.type == "cpu" for tensor in weights)
    if is_small and on_cpu and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def release_worker_threads() -> None:
    """End the threads that helped the calling thread; its next product starts others.

    Does nothing where there is no OpenMP of version 5 or later.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        openmp = ctypes.CDLL(None)  # what this process has loaded: PyTorch loads it for all to see
        openmp.omp_pause_resource(_SOFT, openmp.omp_get_initial_device())
