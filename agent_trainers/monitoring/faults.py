"""Counts of failures outside the model, over all episodes, and the end of a run that only fails."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent_envs.errors import RolloutError
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.trajectory import StopReason

EPISODE_FAULTS: Final[Mapping[StopReason, str]] = {
    StopReason.ENVIRONMENT_ERROR: "environment_error",  # an exception or an invalid reward
    StopReason.TIMEOUT: "environment_timeout",
    StopReason.POLICY_ERROR: "policy_error",
}
TOOL_FAULTS: Final = ("tool_error", "tool_timeout")
MAX_BATCHES: Final = 3
"""Consecutive batches in which most episodes may fail, so that a server can restart."""


def count_faults(episodes: Iterable[EpisodeSummary]) -> dict[str, float]:
    """Return ``faults/<kind>``: the number of failed episodes and tool calls by kind."""
    kinds = (*EPISODE_FAULTS.values(), *TOOL_FAULTS, "tool_result_cut")
    counts = Counter(dict.fromkeys(kinds, 0))
    for episode in episodes:
        if fault := EPISODE_FAULTS.get(episode.stop_reason):
            counts[fault] += 1
        for name in TOOL_FAULTS:
            counts[name] += episode.tool_errors.get(name, 0)
        counts["tool_result_cut"] += episode.num_cut_results
    return {f"faults/{kind}": float(counts[kind]) for kind in kinds}


class FaultWatch:
    """Ends a run in which most episodes fail."""

    def __init__(self, max_share: float | None) -> None:
        """Accept up to this share of failed episodes in a batch; None accepts all."""
        self._max_share = max_share
        self._num_batches: Counter[str] = Counter()

    def check(self, mode: str, episodes: Sequence[EpisodeSummary]) -> None:
        """Check a batch of all processes; ``"train"`` and ``"eval"`` are counted separately.

        Raises:
            RolloutError: If all failed, or most in `MAX_BATCHES` consecutive batches.
        """
        failed = [episode for episode in episodes if episode.stop_reason in EPISODE_FAULTS]
        if self._max_share is None or len(failed) <= self._max_share * len(episodes):
            self._num_batches[mode] = 0
            return
        self._num_batches[mode] += 1
        if len(failed) < len(episodes) and self._num_batches[mode] < MAX_BATCHES:
            return
        kinds = Counter(EPISODE_FAULTS[episode.stop_reason] for episode in failed)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        first = next((e.error for e in failed if e.error), "no error was recorded")
        raise RolloutError(
            f"{len(failed)} of {len(episodes)} episodes failed because of errors outside the model "
            f"({counts}). The first error:\n\n{first.rstrip()}\n\nFix it and resume from the last "
            "checkpoint with --resume; max_fault_share sets the share that may fail."
        )
