"""The answer given most often."""

from collections import Counter
from collections.abc import Sequence

from agent_envs.scoring.answers import normalize_answer
from agent_trainers.trajectory import Trajectory


def choose_by_majority(attempts: Sequence[Trajectory]) -> int:
    """Return which attempt counts: the first with the answers given most often.

    An attempt that a fault ended is returned before all: then the vote is not complete.
    """
    for k, attempt in enumerate(attempts):
        if attempt.error is not None:
            return k
    answers = [_answers(attempt) for attempt in attempts]
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0
    # most_common keeps the order of the first vote where counts are equal
    (winner, _), *_ = votes.most_common(1)
    return answers.index(winner)


def _answers(trajectory: Trajectory) -> tuple[str, ...]:
    """Return what was answered, in the form in which answers are compared."""
    actions = (step.info.get("action", {}) for step in trajectory.transitions)
    return tuple(normalize_answer(a["answer"]) for a in actions if a.get("kind") == "answer")
