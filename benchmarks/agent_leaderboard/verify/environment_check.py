"""What a manifest and its task lists say, compared with the environments themselves."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_envs.errors import DataError
from agent_leaderboard.play.data_files import data_files, data_path, missing_data
from agent_leaderboard.play.episodes import environment_maker, environment_seal
from agent_leaderboard.play.task_lists import draw_tasks, list_tasks, open_tool_env
from agent_leaderboard.records.manifest import EnvironmentRecord, Protocol
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import TaskEntry
from agent_leaderboard.verify.replay_check import differences


class NotAtHandError(DataError):
    """Data that are needed are not there."""


def check_environment(
    environment: EnvironmentRecord,
    protocol: Protocol,
    tasks: Sequence[TaskEntry],
    data: Path | None,
) -> list[str]:
    """Return what the manifest and the task list say otherwise than the environment itself.

    Raises:
        NotAtHandError: If its data are not.
        MissingExtraError: If a package that it needs is not.
        DataError: If it names a file that is none of its data; nothing of it is read.
        AgentEnvsError: If it cannot be made.
    """
    record = f"manifest.json, environment {environment.slug!r}"
    if missing := missing_data(environment, data):
        raise NotAtHandError(
            "its data are not at hand; pass --data, or set AGENT_R1_DATA"
            if data is None
            else f"{data / missing} is not there"
        )
    env, max_turns = open_tool_env(environment_maker(environment, None, data))
    files = data_files(environment, data)
    problems = [f"{record}, field 'data': {text}" for text in _check_data(environment, files, data)]
    truth = {
        "max_turns": max_turns,
        "is_text_public": not files,
        "reward_terms": dict(env.reward_weights),
        "outcome_terms": sorted(env.outcome_terms & env.reward_weights.keys()),
    }
    says = "the environment says"
    problems += [f"{record}, {text}" for text in differences(environment, truth, says)]
    drawn = draw_tasks(env, len(tasks), protocol.seed)
    if [entry.task for entry in tasks] != drawn:
        problems.append(
            f"{environment.tasks_path}, field 'task': these are not the {len(tasks)} tasks that "
            f"the protocol draws with the seed {protocol.seed}"
        )
    seal = environment_seal(environment, data)
    for number, entry in enumerate(tasks, start=1):
        where = f"{environment.tasks_path}, entry {number}"
        if env.num_tasks is not None and entry.task >= env.num_tasks:
            problems.append(f"{where}, field 'task': there is no task {entry.task}")
            continue
        (again,) = list_tasks(env, [entry.task], seal)
        truth = {name: getattr(again, name) for name in ("task_id", "sha256", "labels")}
        problems += [f"{where}, {text}" for text in differences(entry, truth, says)]
    env.close()
    return problems


def _check_data(
    environment: EnvironmentRecord, files: Sequence[str], data: Path | None
) -> Iterator[str]:
    """Compare the data files with those of the run."""
    recorded = {file.name: file.sha256 for file in environment.data}
    for name in recorded.keys() - set(files):
        raise DataError(f"field 'data': {name!r} is no file of the arguments")
    for name in files:
        if name not in recorded:
            yield f"{name} is missing"
        elif file_sha256(data_path(name, data)) != recorded[name]:
            yield f"{name} is another file than the run used (SHA-256)"
