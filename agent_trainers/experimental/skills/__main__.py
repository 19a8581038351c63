"""``python -m agent_trainers.experimental.skills``: extract skills from successful episodes.

With ``--model`` a model writes a skill for each task and a general one; otherwise a skill is the
sequence of actions. The best episode of a task counts. Skills in the output are kept, so the same
command resumes.
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
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_policy,
    open_environment,
    open_policy,
)
from agent_trainers.experimental.skills.skills import (
    Success,
    TaskSkills,
    find_success,
    mine_skills,
    read_skills,
)
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.skills"
notify = notifier(PROGRAM)


@dataclass
class SkillArguments(PolicyArguments):
    """Options of the command."""

    model: str | None = HfArg(
        default=None,
        help="Model that writes the skills: a name on the hub, a folder or a GGUF file; with "
        "base_url, the name on the server. By default a skill is the actions of an episode.",
    )
    trajectories: str = HfArg(
        default="collected.jsonl.gz",
        help="Recorded episodes, as agent-r1-eval writes them.",
    )
    seed: int = HfArg(default=0, help="Seed of all draws.")
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
    best = _best(load_trajectories(options.trajectories))
    if not best:
        raise DataError(
            f"--trajectories {options.trajectories}: no episode succeeded, so there are no skills."
        )
    known = read_skills(output) if output.exists() else {}
    if options.model is None:
        if options.base_url is not None:
            raise ConfigurationError("--base_url needs --model: its name on the server.")
        skills = {t.task_id: success.skill for success, t in best} | known
        _write(output, skills)
    else:
        check_policy(options)
        solved = {trajectory.task_id: trajectory for _, trajectory in best}
        with open_policy(options, open_environment(options, notify)) as policy:
            for skills in mine_skills(policy, solved, known, options.seed):
                _write(output, skills)
    notify(f"{len(skills)} skills of {len(best)} solved tasks: {output}")
    path = "agent_trainers.experimental.skills:SkillDistillation"
    extension = {path: {"weight": 0.5, "skills": str(output)}}
    notify(f"Train with them: agent-r1-train --extensions '{json.dumps(extension)}'")


def _best(trajectories: Sequence[Trajectory]) -> list[tuple[Success, Trajectory]]:
    """Return the best success of each task."""
    best: dict[str, tuple[Success, Trajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        if (success := find_success(trajectory, number)) is None:
            continue
        known = best.get(trajectory.task_id)
        if known is None or success[1:] < known[0][1:]:
            best[trajectory.task_id] = success, trajectory
    return list(best.values())


def _write(output: Path, skills: TaskSkills) -> None:
    rows = [{"skill": skill, "task_id": task_id} for task_id, skill in skills.items()]
    write_text(output, "".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
