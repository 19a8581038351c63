"""Mine skills from successful episodes, for ``agent-r1-train --skills``.

With ``--model`` the model that played sums each success up in its own words, and makes one general
skill of them at the end; without it a skill is the actions of the episode. A task's best episode
counts. Skills that the output holds already are kept, so a command that was stopped goes on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_trainers.cli.arguments import parse, run_command, speaker
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_policy,
    open_policy,
    open_venue,
)
from agent_trainers.experimental.skills.skill_mining import mine_skills
from agent_trainers.experimental.skills.skills import Success, TaskSkills, read_skills, tell_success
from agent_trainers.trajectory import Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.skills"
say = speaker(PROGRAM)


@dataclass
class SkillArguments(PolicyArguments):
    """What skills are mined from, and who tells them."""

    model: str | None = HfArg(
        default=None,
        help="The model that tells its successes in its own words: its name on the hub, a folder, "
        "or a GGUF file; with base_url, the name under which the server knows it. Without it a "
        "skill is the actions of an episode.",
    )
    trajectories: str = HfArg(
        default="collected.jsonl.gz",
        help="Recorded episodes, as agent-r1-eval and agent-r1-eval collect write them.",
    )
    seed: int = HfArg(default=0, help="Seed of every draw.")
    output: str = HfArg(default="skills.jsonl", help="File of skills, a row each: .jsonl.")


def run(arguments: Sequence[str]) -> None:
    """Tell a skill of each task that was solved, and write them."""
    options = parse(
        arguments, SkillArguments, program=PROGRAM, description="Mine skills from successes."
    )
    output = Path(options.output)
    if output.suffix != ".jsonl":
        raise ConfigurationError(f"--output must end in .jsonl, not {output}.")
    best = _best(load_trajectories(options.trajectories))
    if not best:
        raise DataError(
            f"--trajectories {options.trajectories}: no episode in it succeeded, so there is no "
            "skill to tell of."
        )
    known = read_skills(output) if output.exists() else {}
    if options.model is None:
        if options.base_url is not None:
            raise ConfigurationError("--base_url needs --model: the name the server knows it by.")
        skills = {t.task_id: success.skill for success, t in best} | known
        _write(output, skills)
    else:
        check_policy(options)
        solved = {trajectory.task_id: trajectory for _, trajectory in best}
        with open_policy(options, open_venue(options, say)) as policy:
            for skills in mine_skills(policy, solved, known, options.seed):
                _write(output, skills)
    say(f"{len(skills)} skills of {len(best)} solved tasks: {output}")
    say(f"Learn from them with: agent-r1-train --skill_weight 0.5 --skills {output}")


def _best(trajectories: Sequence[Trajectory]) -> list[tuple[Success, Trajectory]]:
    """Return the best success of each task."""
    best: dict[str, tuple[Success, Trajectory]] = {}
    for number, trajectory in enumerate(trajectories):
        if (success := tell_success(trajectory, number)) is None:
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
