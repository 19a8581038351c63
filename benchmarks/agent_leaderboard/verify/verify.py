"""Verify a run: form, checksums, task lists and completeness; then play every episode again.

Whoever changes a file can make its checksum anew. Replay cannot be made to agree: task hashes,
rewards, terms, mistakes, metrics and success are recomputed from the recorded actions in the
environment itself, and agents without a model are asked once more what they do. What stays on
trust is what cannot be asked again: that a model wrote these actions, what they cost, how long they
took, and attempts that did not count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

import gymnasium as gym
from tqdm.auto import tqdm

from agent_envs.core.lookup import lookup
from agent_envs.errors import AgentEnvsError, DataError, MissingExtraError, SandboxUnavailableError
from agent_leaderboard.agents.agent import is_own
from agent_leaderboard.play.config import DATA_PLACEHOLDER, texts_in
from agent_leaderboard.play.episodes import FAULTS, environment_maker, episode_seed, list_episodes
from agent_leaderboard.play.processes import run_all
from agent_leaderboard.play.task_lists import list_tasks, open_tool_env
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Prices,
    Protocol,
    manifest_text,
)
from agent_leaderboard.records.reading import file_sha256, read_lines
from agent_leaderboard.records.results import ResultLine, TaskEntry, parse_line, tasks_text
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.verify.replay_check import ReplayJob, check_lines, differences

LINES_PER_JOB: Final = 50
_SAFE_SANDBOXES: Final = ("strong", "container")
_PATH_ARGUMENTS: Final = ("data", "corpus", "game")
_SHOWN: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What came of it."""

    problems: list[str]
    """What is wrong: file, line, field, and what. Empty where all is well."""
    num_episodes: int = 0
    """Episodes in the run."""
    num_replayed: int = 0
    """Those that were played again."""
    not_replayed: Mapping[str, str] = field(default_factory=dict)
    """Environments that cannot be played here, and why."""
    own_agents: Sequence[str] = ()
    """Agents of somebody's own code: what they did is replayed, but nobody can ask them again."""

    def summary(self) -> str:
        """Return it as text."""
        lines = self.problems[:_SHOWN]
        if (more := len(self.problems) - len(lines)) > 0:
            lines.append(f"... and {more} more")
        lines += [f"NOT replayed: {slug}: {why}" for slug, why in self.not_replayed.items()]
        lines += [
            f"NOT asked again: {slug}: its code is its author's own" for slug in self.own_agents
        ]
        if self.problems:
            lines.append(f"Verification FAILED: {len(self.problems)} problems.")
            return "\n".join(lines)
        scored = f"{self.num_replayed:,} of {self.num_episodes:,} episodes were replayed"
        state = "in part" if self.not_replayed else "in full"
        lines.append(f"Verified {state}: {scored}, every score recomputed; nothing is wrong.")
        return "\n".join(lines)


def verify(run: Path, data: Path | None = None, *, jobs: int = 1) -> Verification:
    """Check a run's folder; nothing that stands in it is an exception.

    Environments that need the `data` folder are not replayed without; `jobs` processes replay.
    """
    folder = RunFolder(run)
    try:
        manifest = folder.read_manifest()
    except DataError as error:
        return Verification(problems=[str(error)])
    problems = [*_check_manifest(folder, manifest), *_check_checksums(folder, manifest)]
    tasks = {e.slug: _read_tasks(folder, e, problems) for e in manifest.environments}
    lines = {
        (environment.slug, agent.slug): _read_results(
            folder, manifest.protocol, environment.slug, agent, tasks[environment.slug], problems
        )
        for environment, agent in manifest.cells
    }
    not_replayed: dict[str, str] = {}
    for environment in tqdm(manifest.environments, desc="checking tasks", leave=False):
        try:
            problems += _check_environment(environment, tasks[environment.slug], data)
        except (MissingExtraError, SandboxUnavailableError, _NotAtHandError) as error:
            not_replayed[environment.slug] = str(error)
        except AgentEnvsError as error:
            problems.append(f"manifest.json, environment {environment.slug!r}: {error}")
            not_replayed[environment.slug] = "see above"
    replay = [
        ReplayJob(
            file=f"results/{slug}/{agent}.jsonl",
            environment=manifest.environment(slug),
            agent=manifest.agent(agent),
            protocol=manifest.protocol,
            lines=own[start : start + LINES_PER_JOB],
            data=data,
        )
        for (slug, agent), own in lines.items()
        if slug not in not_replayed
        for start in range(0, len(own), LINES_PER_JOB)
    ]
    problems += _replay(replay, jobs)
    return Verification(
        problems=problems,
        num_episodes=sum(map(len, lines.values())),
        num_replayed=sum(len(job.lines) for job in replay),
        not_replayed=not_replayed,
        own_agents=[agent.slug for agent in manifest.agents if is_own(agent.kind)],
    )


class _NotAtHandError(DataError):
    """Data that are needed are not there."""


# What stands in the folder


def _check_manifest(folder: RunFolder, manifest: Manifest) -> Iterator[str]:
    if folder.manifest_path.read_text(encoding="utf-8") != manifest_text(manifest):
        yield "manifest.json: is not in the form in which manifests are written"
    for environment in manifest.environments:
        yield from (
            f"manifest.json, environment {environment.slug!r}, {text}"
            for text in _check_kwargs(environment)
        )


def _check_kwargs(environment: EnvironmentRecord) -> Iterator[str]:
    """Yield what a manifest of others must not make this machine do."""
    kwargs = environment.kwargs
    try:
        lookup(gym.registry, environment.id, kind="environment")
    except KeyError as error:
        yield f"field 'id': {error}"
    if kwargs.get("sandbox", "strong") not in _SAFE_SANDBOXES:
        yield (
            f"field 'kwargs': recorded programs are not run in the sandbox {kwargs['sandbox']!r}; "
            f"only in {' or '.join(_SAFE_SANDBOXES)}"
        )
    for name in _PATH_ARGUMENTS:
        for text in texts_in(kwargs.get(name)):
            path = PurePosixPath(text)
            if path.parts[:1] != (DATA_PLACEHOLDER,) or ".." in path.parts:
                yield f"field 'kwargs': {name} {text!r} is no file below {DATA_PLACEHOLDER}"


def _check_checksums(folder: RunFolder, manifest: Manifest) -> Iterator[str]:
    try:
        checksums = folder.read_checksums()
    except DataError as error:
        yield str(error)
        return
    expected = set(folder.expected_files(manifest))
    for name in sorted(expected - checksums.keys()):
        yield f"checksums.json: {name} is missing"
    for name in sorted(checksums.keys() - expected):
        yield f"checksums.json: {name!r} is no file of this run"
    for name in sorted(expected & checksums.keys()):
        try:
            if file_sha256(folder.path / name) != checksums[name]:
                yield f"{name}: its checksum is not that in checksums.json"
        except DataError as error:
            yield str(error)
    for part in ("tasks", "results"):
        for path in sorted((folder.path / part).rglob("*")):
            name = path.relative_to(folder.path).as_posix()
            if path.is_file() and name not in expected:
                yield f"{name}: is no file of this run"


def _read_tasks(
    folder: RunFolder, environment: EnvironmentRecord, problems: list[str]
) -> list[TaskEntry]:
    name = environment.tasks_path
    try:
        entries = folder.read_tasks(environment.slug)
        digest = file_sha256(folder.path / name)
    except DataError as error:
        problems.append(str(error))
        return []
    if folder.tasks_path(environment.slug).read_text(encoding="utf-8") != tasks_text(entries):
        problems.append(f"{name}: is not in the form in which task lists are written")
    if digest != environment.tasks_sha256:
        problems.append(f"{name}: is not the task list of the manifest (field 'tasks_sha256')")
    if len(entries) != environment.num_tasks:
        problems.append(
            f"{name}: has {len(entries)} tasks; manifest.json, field 'num_tasks' says "
            f"{environment.num_tasks}"
        )
    for task, count in Counter(entry.task for entry in entries).items():
        if count > 1:
            problems.append(f"{name}: task {task} is listed {count} times")
    return entries


def _read_results(
    folder: RunFolder,
    protocol: Protocol,
    environment: str,
    agent: AgentRecord,
    tasks: Sequence[TaskEntry],
    problems: list[str],
) -> list[tuple[int, ResultLine]]:
    """Return the lines of listed episodes, each with its number in the file."""
    name = f"results/{environment}/{agent.slug}.jsonl"
    lines: list[tuple[int, ResultLine]] = []
    try:
        for number, text in read_lines(folder.results_path(environment, agent.slug)):
            try:
                lines.append((number, parse_line(text, f"{name}, line {number}")))
            except DataError as error:
                problems.append(str(error))
    except DataError as error:
        problems.append(str(error))
    by_task = {entry.task: entry for entry in tasks}
    for number, line in lines:
        # What a line must say because of where it stands.
        expected: dict[str, Any] = {
            "environment": environment,
            "agent": agent.slug,
            "seed": episode_seed(protocol, max(line.task, 0), max(line.sample, 0)),
        }
        if entry := by_task.get(line.task):
            expected |= {"task_id": entry.task_id, "task_sha256": entry.sha256}
            expected["labels"] = entry.labels
        texts = [*differences(line, expected, "must be"), *_check_usage(line, agent.prices)]
        problems += [f"{name}, line {number}, {text}" for text in texts]
    wanted = [(entry.task, sample) for entry, sample in list_episodes(tasks, protocol)]
    problems += [f"{name}{text}" for text in _check_order(wanted, lines)]
    listed = set(wanted)
    return [(number, line) for number, line in lines if (line.task, line.sample) in listed]


def _check_usage(line: ResultLine, prices: Prices | None) -> Iterator[str]:
    usage = line.usage
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        if getattr(usage, name) < 0:
            yield f"field 'usage.{name}': is negative"
    money = None if prices is None else prices.cost(usage.prompt_tokens, usage.completion_tokens)
    if usage.money != money:
        yield f"field 'usage.money': is {usage.money}, the prices give {money}"
    if (line.error is None) == (line.stop_reason in FAULTS):
        yield f"field 'error': is {line.error!r}, but 'stop_reason' is '{line.stop_reason}'"


def _check_order(
    wanted: Sequence[tuple[int, int]], lines: Sequence[tuple[int, ResultLine]]
) -> Iterator[str]:
    """Yield episodes that are missing, there twice, of no task, or in another order."""
    found = [(line.task, line.sample) for _, line in lines]
    listed, there, seen = set(wanted), set(found), set[tuple[int, int]]()
    for task, sample in wanted:
        if (task, sample) not in there:
            yield f": task {task}, sample {sample} is missing"
    for (number, line), episode in zip(lines, found, strict=True):
        if episode not in listed:
            yield f", line {number}, field 'task': {episode} is not listed"
        elif episode in seen:
            yield f", line {number}, field 'task': task {line.task} is there twice"
        seen.add(episode)
    if sorted(found) == sorted(wanted) and found != wanted:
        number = next(i for i, (a, b) in enumerate(zip(found, wanted, strict=True), 1) if a != b)
        yield f", line {number}, field 'task': episodes are not in the order of the task list"


# What the environments say


def _check_environment(
    environment: EnvironmentRecord, tasks: Sequence[TaskEntry], data: Path | None
) -> list[str]:
    """Return what the manifest and the task list say otherwise than the environment itself."""
    for text in _check_kwargs(environment):
        raise DataError(f"is not played: {text}")
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
    limit = env.num_tasks
    for number, entry in enumerate(tasks, start=1):
        where = f"{environment.tasks_path}, entry {number}"
        if entry.task < 0 or (limit is not None and entry.task >= limit):
            problems.append(f"{where}, field 'task': there is no task {entry.task}")
            continue
        (again,) = list_tasks(env, [entry.task])
        truth = {name: getattr(again, name) for name in ("task_id", "sha256", "labels")}
        problems += [f"{where}, {text}" for text in differences(entry, truth, says)]
    env.close()
    return problems


def _check_data(environment: EnvironmentRecord, data: Path | None) -> Iterator[str]:
    """Compare the data files with those of the run; `_NotAtHandError` if there are none here."""
    named = {
        text.removeprefix(f"{DATA_PLACEHOLDER}/")
        for text in texts_in(environment.kwargs)
        if DATA_PLACEHOLDER in text
    }
    if named and data is None:
        raise _NotAtHandError("its data are not at hand; pass --data, or set AGENT_R1_DATA")
    folder = data or Path()
    recorded = {file.name: file.sha256 for file in environment.data}
    for name in sorted(named):
        if not (folder / name).exists():
            raise _NotAtHandError(f"{folder / name} is not there")
        if name not in recorded and not (folder / name).is_dir():
            yield f"{name} is missing"
    for name, sha256 in recorded.items():
        is_named = any(name == other or name.startswith(f"{other}/") for other in named)
        if not is_named:
            yield f"{name!r} is no file of the arguments"
        elif file_sha256(folder / name) != sha256:
            yield f"{name} is another file than the run used (SHA-256)"


def _replay(jobs: Sequence[ReplayJob], processes: int) -> list[str]:
    found: dict[int, list[str]] = {}
    with tqdm(total=sum(len(job.lines) for job in jobs), desc="replaying", unit="episode") as bar:
        for number, problems in run_all(check_lines, jobs, processes):
            found[number] = problems
            bar.update(len(jobs[number].lines))
    return [problem for number in sorted(found) for problem in found[number]]
