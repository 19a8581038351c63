"""Count what went wrong while a batch was played, through no fault of the model.

Shares over the episodes that count would leave out what happened in those that do not; these are
numbers over all of them, and nothing is left out or counted twice.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

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
