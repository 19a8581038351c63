"""``python -m agent_trainers.experimental.skills``: extract skills from successful episodes.

The skill of a task is the sequence of actions of its best episode.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli.arguments import notifier, parse, run_command
from agent_trainers.experimental.skills.skills import Success, find_success
from agent_trainers.trajectory import load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.skills"
notify = notifier(PROGRAM)


@dataclass
class SkillArguments:
    """Options of the command."""

    trajectories: str = HfArg(
        default="collected.jsonl.gz",
        help="Recorded episodes, as agent-r1-eval writes them.",
    )
    output: str = HfArg(default="skills.jsonl", help="Output file: .jsonl.")


def run(arguments: Sequence[str]) -> None:
    """Write a skill for each solved task."""
    options = parse(
        arguments,
        SkillArguments,
        program=PROGRAM,
        description="Extract skills from successful episodes.",
    )
    output = Path(options.output)
    if output.suffix != ".jsonl":
        raise ConfigurationError(f"--output must end in .jsonl, not {output}.")
    best: dict[str, Success] = {}
    for number, trajectory in enumerate(load_trajectories(options.trajectories)):
        if (success := find_success(trajectory, number)) is not None:
            known = best.get(trajectory.task_id, success)
            best[trajectory.task_id] = min(success, known, key=lambda s: s[1:])
    if not best:
        raise DataError(
            f"--trajectories {options.trajectories}: no episode succeeded, so there are no skills."
        )
    rows = [{"skill": success.skill, "task_id": task_id} for task_id, success in best.items()]
    write_text(output, "".join(f"{json.dumps(row)}\n" for row in rows))
    notify(f"{len(rows)} skills: {output}")
    path = "agent_trainers.experimental.skills:SkillDistillation"
    extension = {path: {"weight": 0.5, "skills": str(output)}}
    notify(f"Train with them: agent-r1-train --extensions '{json.dumps(extension)}'")


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
