"""What a manifest and its task lists say, compared with the environments themselves."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_envs.errors import DataError
from agent_leaderboard.play.config import DATA_PLACEHOLDER, texts_in
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
        DataError: If it names a file that is none of its data; nothing of it is read.
        AgentEnvsError: If it cannot be made.
    """
    record = f"manifest.json, environment {environment.slug!r}"
    problems = [f"{record}, field 'data': {text}" for text in _check_data(environment, data)]
    env, max_turns = open_tool_env(environment_maker(environment, None, data))
    truth = {
        "max_turns": max_turns,
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


def _check_data(environment: EnvironmentRecord, data: Path | None) -> Iterator[str]:
    """Compare the data files with those of the run; `NotAtHandError` if there are none here."""
    named = {
        text.removeprefix(f"{DATA_PLACEHOLDER}/")
        for text in texts_in(environment.kwargs)
        if DATA_PLACEHOLDER in text
    }
    if named and data is None:
        raise NotAtHandError("its data are not at hand; pass --data, or set AGENT_R1_DATA")
    folder = data or Path()
    recorded = {file.name: file.sha256 for file in environment.data}
    for name in sorted(named):
        if not (folder / name).exists():
            raise NotAtHandError(f"{folder / name} is not there")
        if name not in recorded and not (folder / name).is_dir():
            yield f"{name} is missing"
    if environment.is_text_public and named:
        yield "are named, so the text is not public; but 'is_text_public' is true"
    for name, sha256 in recorded.items():
        is_named = any(name == other or name.startswith(f"{other}/") for other in named)
        if not is_named or ".." in Path(name).parts:
            raise DataError(f"field 'data': {name!r} is no file of the arguments")
        if file_sha256(folder / name) != sha256:
            yield f"{name} is another file than the run used (SHA-256)"
