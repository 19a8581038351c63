"""Choose among several attempts at each task by a learned value or reward model (best of n).

``python -m agent_trainers.experimental.search played.jsonl --value runs/value`` compares the choice
with a single attempt, and with the choice by true returns, an upper bound.
"""

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.errors import DataError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.experimental.diagnose import name_file
from agent_trainers.experimental.reward_model import RESULTS_FILE, RewardModel
from agent_trainers.experimental.values import ProcessValue
from agent_trainers.rollout.rescoring import episode_texts
from agent_trainers.trajectory import TaskKey, Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.search"


@dataclass
class SearchArguments:
    """Options of the command."""

    trajectories: str = HfArg(
        help="File of several episodes of each task, as agent-r1-eval --samples_per_task 8 "
        "--trajectories writes it.",
    )
    value: str = HfArg(
        help="Folder of a trained value of the same model, of a run with a critic, or of a reward "
        "model."
    )


def run(arguments: Sequence[str]) -> None:
    """Print how often a choice among the attempts at a task succeeds."""
    options = parse(
        name_file(arguments),
        SearchArguments,
        program=PROGRAM,
        description="Choose among several attempts at each task by a learned value.",
    )
    learned: Callable[[Trajectory], float]
    if (Path(options.value) / RESULTS_FILE).is_file():
        model = RewardModel(options.value)
        learned = lambda attempt: model.judge(*episode_texts(attempt))["value"]  # noqa: E731
    else:
        learned = functools.partial(score, value=ProcessValue.load(options.value))
    by_task: dict[TaskKey, list[Trajectory]] = {}
    for trajectory in load_trajectories(options.trajectories):
        if trajectory.is_scorable:
            by_task.setdefault(trajectory.task_key, []).append(trajectory)
    if not by_task:
        raise DataError(f"{options.trajectories}: no episode could be scored.")
    searches = list(by_task.values())
    _report("sample", [attempts[:1] for attempts in searches], lambda _: 0.0)
    _report("best_of", searches, learned)
    _report("oracle_best_of", searches, lambda trajectory: trajectory.return_)


def score(trajectory: Trajectory, value: ProcessValue) -> float:
    """Return the value of an episode's end, which is that of its last action.

    Where the environment starts another conversation, as with the next of several questions, the
    new state does not show the past: the gains within all conversations are added up.
    """
    steps = trajectory.transitions
    starts = [0]
    for t, (before, after) in enumerate(itertools.pairwise(steps), start=1):
        extends = after.messages[: len(before.messages)] == before.messages
        if not extends and not (before.info.get("context") or {}).get("reason"):
            starts.append(t)
    last = [steps[t - 1] for t in [*starts[1:], len(steps)]]
    if not all(step.prompt_ids for step in last):
        raise DataError("The file has no token ids; a served model returns none.")
    firsts = value.values([steps[t].prompt_ids for t in starts])
    lasts = value.values([[*step.prompt_ids, *step.completion_ids] for step in last])
    return firsts[0] + sum(lasts) - sum(firsts)


def _report(
    name: str, searches: Sequence[Sequence[Trajectory]], score: Callable[[Trajectory], float]
) -> None:
    """Print success and cost of the choice by the highest score."""
    success = sum(max(attempts, key=score).success for attempts in searches) / len(searches)
    low, high = wilson_interval(success, len(searches))
    num_steps = sum(len(attempt.transitions) for attempts in searches for attempt in attempts)
    sys.stdout.write(
        f"{name:15} success {success:.3f} [{low:.2f}, {high:.2f}]; {num_steps / len(searches):.1f} "
        "steps per task\n"
    )


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
