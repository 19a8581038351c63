"""Counts of failures outside the model, over all episodes, and the end of a run that only fails."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent_envs.errors import RolloutError
from agent_trainers.trajectory import StopReason, Trajectory

EPISODE_FAULTS: Final[Mapping[StopReason, str]] = {
    StopReason.ENVIRONMENT_ERROR: "environment_error",  # an exception or an invalid reward
    StopReason.TIMEOUT: "environment_timeout",
    StopReason.POLICY_ERROR: "policy_error",
}
TOOL_FAULTS: Final = ("tool_error", "tool_timeout")
RESULT_CUT: Final = "tool_result_cut"
MAX_BATCHES: Final = 3
"""Consecutive batches in which most episodes may fail, so that a server can restart."""


def count_faults(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Return the number of failed episodes and tool calls by kind."""
    counts = Counter(dict.fromkeys((*EPISODE_FAULTS.values(), *TOOL_FAULTS, RESULT_CUT), 0))
    for trajectory in trajectories:
        if (fault := EPISODE_FAULTS.get(trajectory.stop_reason)) is not None:
            counts[fault] += 1
        for transition in trajectory.transitions:
            action = transition.info.get("action") or {}
            for call in action.get("calls") or [action]:
                if call.get("error") in TOOL_FAULTS:
                    counts[call["error"]] += 1
                if call.get("num_cut_chars"):
                    counts[RESULT_CUT] += 1
    return dict(counts)


class FaultWatch:
    """Ends a run in which most episodes fail."""

    def __init__(self, max_share: float | None) -> None:
        """Accept up to this share of failed episodes in a batch; None accepts all."""
        self._max_share = max_share
        self._num_batches: Counter[str] = Counter()

    def check(self, mode: str, num_episodes: int, failed: Sequence[tuple[str, str | None]]) -> None:
        """Check a batch.

        Args:
            mode: ``"train"`` or ``"eval"``, which are counted separately.
            num_episodes: Episodes of all processes.
            failed: Kind and error of each failed episode.

        Raises:
            RolloutError: If all failed, or most in `MAX_BATCHES` consecutive batches.
        """
        if self._max_share is None or len(failed) <= self._max_share * num_episodes:
            self._num_batches[mode] = 0
            return
        self._num_batches[mode] += 1
        if len(failed) < num_episodes and self._num_batches[mode] < MAX_BATCHES:
            return
        kinds = Counter(kind for kind, _ in failed)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        first = next((error for _, error in failed if error), "no error was recorded")
        raise RolloutError(
            f"{len(failed)} of {num_episodes} episodes failed because of errors outside the model "
            f"({counts}). The first error:\n\n{first.rstrip()}\n\nFix it and resume from the last "
            "checkpoint with --resume; max_fault_share sets the share that may fail."
        )
