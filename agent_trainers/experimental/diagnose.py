"""Find the step that lost each failed episode of a file.

``python -m agent_trainers.experimental.diagnose trajectories.jsonl`` tries the environment's
reference actions from the states of each episode, names the last state from which one succeeds, and
writes a page.
"""

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
from transformers.hf_argparser import HfArg

from agent_envs.core.async_bridge import resolve
from agent_envs.core.command_line import counted, json_object
from agent_envs.errors import AgentEnvsError, ConfigurationError, DataError, ReplayError
from agent_trainers.cli.arguments import parse, run_command
from agent_trainers.cli.environments import add_working_directory, inspect_environment
from agent_trainers.monitoring.report import write_trajectory_page
from agent_trainers.monitoring.trajectory_samples import TrajectorySample
from agent_trainers.rollout.environments import MakeEnv, TextEnv
from agent_trainers.trajectory import TRAJECTORIES_FILE, Trajectory, load_trajectories

PROGRAM: Final = "python -m agent_trainers.experimental.diagnose"
MAX_PLANS: Final = 32
"""Plans tried at a state, those closest to the progress so far first."""
STEP_TIMEOUT: Final = 300.0
"""Seconds that an async reset or step may take."""
NEVER_SOLVED: Final = "the reference actions solve it from no state, so no step can be named"
_ACTION_CHARS: Final = 48


@dataclass
class DiagnoseArguments:
    """Options of the command."""

    trajectories: str = HfArg(help="File of episodes, or the folder of a run.")
    env: str | None = HfArg(
        default=None, help="Gymnasium id of their environment; by default that of each episode."
    )
    env_kwargs: str | None = HfArg(
        default=None, help="Its keyword arguments as JSON, instead of the recorded ones."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Diagnosis of one episode."""

    trajectory: Trajectory
    """The failed episode."""
    lost_step: int | None = None
    """Step, from 0, after which the task could no longer be solved; None if none can be named."""
    solution: tuple[str, ...] = ()
    """Actions that solve the task from the state before that step."""
    note: str = ""
    """Reason why no step is named."""


def run(arguments: Sequence[str]) -> None:
    """Diagnose the episodes of a file."""
    options = parse(
        name_file(arguments),
        DiagnoseArguments,
        program=PROGRAM,
        description="Name the step that lost each failed episode, by trying the reference actions "
        "from its states.",
    )
    path = Path(options.trajectories)
    path = path / TRAJECTORIES_FILE if path.is_dir() else path
    failed = _read_failed(path)
    kwargs = json_object(options.env_kwargs, "--env_kwargs")
    add_working_directory()
    if options.env is not None:
        inspect_environment(options.env, kwargs)
    failed = [
        (number, replace(t, env_id=options.env, env_kwargs=kwargs))
        if options.env else (number, replace(t, env_kwargs=t.env_kwargs | kwargs))
        for number, t in failed
    ]  # fmt: skip
    diagnoses = diagnose_by_oracle(None, [each for _, each in failed])
    samples = [
        TrajectorySample(label=f"row {number}", trajectory=found.trajectory, diagnosis=found)
        for (number, _), found in zip(failed, diagnoses, strict=True)
    ]
    stem = path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + ".diagnosis")
    title = f"Which step lost it? {', '.join({each.env_id: 0 for _, each in failed})}"
    write_trajectory_page(f"{stem}.html", samples, tokenizer=None, title=title)
    for sample in samples:
        task_id = sample.trajectory.task_id
        sys.stdout.write(f"{sample.label}, {task_id:.40}: {_describe(sample.diagnosis)}\n")
    num_named = sum(sample.diagnosis.lost_step is not None for sample in samples)
    sys.stdout.write(f"{counted(len(samples), 'failed episode')}, {num_named} with a named step\n")
    sys.stdout.write(f"Page of all steps: {stem}.html\n")


def name_file(arguments: Sequence[str]) -> list[str]:
    """Turn a leading file name into the option ``--trajectories``."""
    is_file = arguments and not arguments[0].startswith("-")
    return ["--trajectories", *arguments] if is_file else list(arguments)


def _read_failed(path: Path) -> list[tuple[int, Trajectory]]:
    """Return the failed episodes with their rows in the file, from 1."""
    rows = list(enumerate(load_trajectories(path), start=1))
    scored = [(n, t) for n, t in rows if t.is_scorable and "success" in t.metrics]
    failed = [(number, t) for number, t in scored if not t.success]
    if not failed:
        raise DataError(
            f"{path}: none of the {len(rows)} episodes failed ({len(rows) - len(scored)} could not "
            "be scored, or have no metric 'success')."
        )
    return failed


def _describe(diagnosis: Diagnosis) -> str:
    steps, lost = diagnosis.trajectory.transitions, diagnosis.lost_step
    if lost is None:
        return diagnosis.note
    action = " ".join(steps[lost].action.split()).encode("utf-8", "replace").decode("utf-8")
    return f"lost at {lost + 1} of {len(steps)}, {action[:_ACTION_CHARS]}"


def diagnose_by_oracle(
    make_env: MakeEnv | None, trajectories: Sequence[Trajectory]
) -> list[Diagnosis]:
    """Try the task's reference actions from the states of failed episodes.

    At a state the oracle asks for ``reference_actions()`` and tries every suffix of them. A state
    from which one succeeds, and all states before it, can still be won. An episode in which the
    environment raises or differs from the recording is not diagnosed; see its note.

    Without `make_env` each episode gets the environment that it was recorded in.

    Raises:
        ConfigurationError: If an environment has no ``reference_actions()``.
        AgentEnvsError: If no environment can be made, or no episode replayed.
    """
    errors: list[BaseException] = []
    diagnoses: list[Diagnosis] = []
    for trajectory in trajectories:
        try:
            with contextlib.closing(make_env() if make_env else trajectory.make_env()) as env:
                diagnoses.append(_diagnose(env, trajectory))
        except ConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code, noted
            note = f"{type(error).__name__}: {error}"
            diagnoses.append(Diagnosis(trajectory=trajectory, note=note))
            errors.append(error)
    if len(errors) == len(trajectories) and isinstance(
        errors[0], (AgentEnvsError, gym.error.Error)
    ):
        raise errors[0]
    return diagnoses


def _diagnose(env: TextEnv, trajectory: Trajectory) -> Diagnosis:
    if trajectory.seed is None:
        raise ReplayError(f"task {trajectory.task_id!r}: the file has no seed to replay from.")
    for t in reversed(range(len(trajectory.transitions))):
        for plan in _plans(env, trajectory, t):
            if _succeeds(env, trajectory, t, plan):
                return Diagnosis(trajectory=trajectory, lost_step=t, solution=plan)
    return Diagnosis(trajectory=trajectory, note=NEVER_SOLVED)


def _plans(env: TextEnv, trajectory: Trajectory, t: int) -> list[tuple[str, ...]]:
    """Return the suffixes of the reference actions, the nearest to the progress first."""
    deque(trajectory.replay(env, t, STEP_TIMEOUT), maxlen=0)
    find: Any = getattr(env.unwrapped, "reference_actions", None)
    if find is None:
        raise ConfigurationError(
            "The environment has no reference_actions(), which the diagnosis needs."
        )
    try:
        reference: list[str] = list(find())
    except NotImplementedError:  # this task has none
        return []
    num_done = 0
    for transition in trajectory.transitions[:t]:
        num_done += num_done < len(reference) and reference[num_done] == transition.action
    starts = sorted(range(len(reference)), key=lambda i: abs(i - num_done))
    return [tuple(reference[i:]) for i in starts[:MAX_PLANS]]


def _succeeds(env: TextEnv, trajectory: Trajectory, t: int, plan: Sequence[str]) -> bool:
    deque(trajectory.replay(env, t, STEP_TIMEOUT), maxlen=0)
    for action in plan:
        *_, terminated, truncated, info = resolve(env.step(action), STEP_TIMEOUT)
        if terminated or truncated:
            return float(info.get("metrics", {}).get("success", 0.0)) > 0.0
    return False


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
