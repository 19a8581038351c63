"""Count what went wrong while a batch was played, through no fault of the model.

Shares over the episodes that count would leave out what happened in those that do not; these are
numbers over all of them, and nothing is left out or counted twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from agent_envs.errors import RolloutError
from agent_trainers.trajectory import StopReason, Trajectory

EPISODE_FAULTS: Final[Mapping[StopReason, str]] = {
    StopReason.ENVIRONMENT_ERROR: "environment_error",  # raised, or gave a reward that is no number
    StopReason.TIMEOUT: "environment_timeout",
    StopReason.POLICY_ERROR: "policy_error",
}
TOOL_FAULTS: Final = ("tool_error", "tool_timeout")
RESULT_CUT: Final = "tool_result_cut"


def count_faults(trajectories: Iterable[Trajectory]) -> dict[str, int]:
    """Return how many episodes and tool calls failed, by kind; 0 where none did."""
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


MAX_BATCHES: Final = 3
"""Batches in a row that may fail for the most part: a server that is restarted ends no run."""


class FaultWatch:
    """Ends a run in which there is nothing left to learn from."""

    def __init__(self, max_share: float | None) -> None:
        """Accept that up to this share of a batch's episodes fails; None accepts all."""
        self._max_share = max_share
        self._num_batches: Counter[str] = Counter()

    def check(self, mode: str, num_episodes: int, failed: Sequence[tuple[str, str | None]]) -> None:
        """Look at a batch of `num_episodes`.

        Args:
            mode: ``"train"`` or ``"eval"``: each is counted by itself.
            num_episodes: Of all processes.
            failed: The kind of fault of those that failed, and the error.

        Raises:
            RolloutError: If all failed, or most in `MAX_BATCHES` running.
        """
        if self._max_share is None or len(failed) <= self._max_share * num_episodes:
            self._num_batches[mode] = 0
            return
        self._num_batches[mode] += 1
        if len(failed) < num_episodes and self._num_batches[mode] < MAX_BATCHES:
            return
        kinds = Counter(kind for kind, _ in failed)
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        first = next((error for _, error in failed if error), "no error was kept")
        raise RolloutError(
            f"{len(failed)} of {num_episodes} episodes failed through no fault of the model "
            f"({counts}), so there is nothing to learn from. The first error:\n\n"
            f"{first.rstrip()}\n\nMend it and go on from the last checkpoint with --resume; "
            "max_fault_share says how many may fail."
        )
