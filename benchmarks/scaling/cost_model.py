"""A model of an optimiser step with named terms: fitted on measured cases, carried over to GPUs.

Every term is a sum of counted work times a cost that is at least 0, fitted by least squares of the
relative error. What is carried over to GPUs is which work a term is made of; the costs there come
from stated assumptions, not from this machine.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.scaling.cases import Case, Work, case_work, work_of

WORK_OF_TERMS: Final[Mapping[str, tuple[str, ...]]] = {
    "generate": ("waves", "sampled", "read", "attended"),
    "environment": ("turns", "steps"),
    "score": ("constant", "trained"),
    "train": ("constant", "trained", "squared"),
    "communication": ("constant",),
}
"""Which counted work each term is made of."""
_COUNTED: Final[Mapping[str, Callable[[Work], float]]] = {
    "constant": lambda work: 1.0,
    "steps": lambda work: work.episodes * work.turns,
}
_MIN_SECONDS: Final = 1e-4


def variables(term: str, work: Work) -> list[float]:
    """Return the counted work of a term."""
    names = WORK_OF_TERMS[term]
    return [_COUNTED[n](work) if n in _COUNTED else float(getattr(work, n)) for n in names]


def fit(measured: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Fit the seconds per unit of work of each term on results of `measure`.

    Communication is fitted where there are several processes.
    """
    costs = {}
    for term, names in WORK_OF_TERMS.items():
        entries = [m for m in measured if term != "communication" or m["case"]["processes"] > 1]
        if not entries:
            costs[term] = dict.fromkeys(names, 0.0)
            continue
        work = np.array([variables(term, case_work(Case(**m["case"]))) for m in entries])
        seconds = np.array([max(_MIN_SECONDS, m["seconds"][term]["median"]) for m in entries])
        solution = non_negative_least_squares(work / seconds[:, None], np.ones(len(seconds)))
        costs[term] = dict(zip(names, solution.tolist(), strict=True))
    return costs


def predict(case: Case, costs: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the seconds of each term, and their total, of a case on this machine."""
    seconds = {
        term: float(np.dot(variables(term, case_work(case)), list(costs[term].values())))
        for term in WORK_OF_TERMS
    }
    if case.processes == 1:
        seconds["communication"] = 0.0
    return seconds | {"total": sum(seconds.values())}


def non_negative_least_squares(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return x >= 0 with the least ``|a x - b|``, by trying which entries are 0; for few columns.

    The shapes are (N, K) of `a`, (N,) of `b`.
    """
    best, least = np.zeros(a.shape[1]), float(np.linalg.norm(b))
    for size in range(1, a.shape[1] + 1):
        for columns in itertools.combinations(range(a.shape[1]), size):
            part, *_ = np.linalg.lstsq(a[:, columns], b, rcond=None)
            error = float(np.linalg.norm(a[:, columns] @ part - b))
            if (part >= 0).all() and error < least - 1e-12:
                best = np.zeros(a.shape[1])
                best[list(columns)] = part
                least = error
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What is assumed of GPUs and of the run; none of it was measured by us."""

    parameters: float = 3.1e9
    """Of the model: about Qwen2.5-3B."""
    cache_bytes_per_token: float = 36_864.0
    """Keys and values of 36 layers, 2 heads of 128, in bf16."""
    layers_times_width: float = 36 * 2048.0
    """For the cost of attention in training."""
    episodes: int = 640
    """In an optimiser step: 128 questions, groups of 5."""
    turns: int = 5
    prompt_tokens: float = 400.0
    action_tokens: float = 200.0
    observation_tokens: float = 700.0
    peak_flops: float = 989e12
    """Of one GPU in bf16 (H100)."""
    train_utilisation: float = 0.35
    prefill_utilisation: float = 0.4
    memory_bytes_per_second: float = 3.35e12
    memory_utilisation: float = 0.6
    seconds_per_decode_pass: float = 2e-3
    """Overhead of one pass beside reading memory."""
    environment_latency_seconds: float = 0.05
    """Of one step; the environments of a process work side by side, so a turn costs it once."""
    environment_cpu_seconds: float = 5e-4
    """Of one step; what environments of a process cannot share."""
    score_seconds_per_token: float = 1e-6
    """Rows, credit, padding: Python and copies, per trained token of a process."""
    node_size: int = 8
    node_bytes_per_second: float = 300e9
    """All-reduce bandwidth of a GPU within a node (NVLink)."""
    network_bytes_per_second: float = 40e9
    """The same between nodes."""
    gradient_bytes: float = 2.0
    """Per parameter (bf16)."""


def extrapolate(assumptions: Assumptions, processes: int) -> dict[str, float]:
    """Return the seconds of each term, and their total, on `processes` GPUs.

    The batch stays the same and is shared evenly; every GPU samples and trains (colocated), keeps
    its keys and values from turn to turn, and holds the whole model.
    """
    a = assumptions
    work = work_of(
        episodes=a.episodes / processes,
        turns=a.turns,
        prompt=a.prompt_tokens,
        action=a.action_tokens,
        observation=a.observation_tokens,
        processes=processes,
    )
    memory = a.memory_bytes_per_second * a.memory_utilisation
    seconds_per_pass = 2 * a.parameters / memory + a.seconds_per_decode_pass
    prefill = 2 * a.parameters * work.read / (a.peak_flops * a.prefill_utilisation)
    attention = 12 * a.layers_times_width * work.squared / 2
    flops = 6 * a.parameters * work.trained + attention
    seconds = {
        "generate": work.waves * seconds_per_pass
        + work.attended * a.cache_bytes_per_token / memory
        + prefill,
        "environment": work.turns * a.environment_latency_seconds
        + work.episodes * work.turns * a.environment_cpu_seconds,
        "score": work.trained * a.score_seconds_per_token,
        "train": flops / (a.peak_flops * a.train_utilisation),
        "communication": all_reduce_seconds(a, processes),
    }
    return seconds | {"total": sum(seconds.values())}


def all_reduce_seconds(assumptions: Assumptions, processes: int) -> float:
    """Return how long the gradients of a step take: a ring in each node, then one between nodes.

    A ring of N moves ``2 (N - 1) / N`` times the bytes through each link.
    """
    a = assumptions
    size = a.parameters * a.gradient_bytes
    inside = min(processes, a.node_size)
    nodes = math.ceil(processes / a.node_size)
    within = 2 * (inside - 1) / inside * size / a.node_bytes_per_second
    # each GPU of a node carries its part of the gradient between the nodes
    between = 2 * (nodes - 1) / nodes * size / inside / a.network_bytes_per_second
    return within + between
