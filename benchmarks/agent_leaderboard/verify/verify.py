"""Verification of a run: form, completeness, task lists, then replay of every episode.

Checksums can be forged; replay cannot. Drawn tasks, their hashes, rewards, terms, errors, metrics
and success are recomputed from the recorded actions in the environment itself. Agents without a
model, and those of the embedded policy, run again, and tables are made again. The summary names
what stays on trust: that a model wrote these actions, and what they cost.
"""

import dataclasses
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from agent_envs.core.command_line import counted
from agent_envs.errors import AgentEnvsError, DataError, MissingExtraError, SandboxUnavailableError
from agent_leaderboard.agents.agent import acts_by_rules, is_custom, is_recounted, is_repeatable
from agent_leaderboard.play.environments import recorded_environment
from agent_leaderboard.play.episodes import (
    FAULTS,
    Chunk,
    ReplayedEpisode,
    Replayer,
    as_floats,
    run_chunk,
)
from agent_leaderboard.play.prepare import complete_record, complete_settings, recorded_settings
from agent_leaderboard.play.run import WORK, run_all
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    differences,
    published,
    to_json,
)
from agent_leaderboard.records.reading import MAX_FILE_BYTES, read_text
from agent_leaderboard.records.results import (
    CHECKSUMS,
    FILES,
    MANIFEST,
    RESULTS,
    EpisodeResult,
    Run,
    list_episodes,
    make_checksums,
    read_checksums,
    read_run,
    task_list_sha256,
)
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import PAGE, REPORT, make_markdown
from agent_leaderboard.report.visible_text import visible
from agent_leaderboard.verify.claims import check_names, check_strategy, check_tokens, check_usage
from agent_trainers import TINY_POLICY
from agent_trainers.trajectory import StopReason

EPISODES_PER_JOB: Final = 50
MAX_PROBLEMS: Final = 1_000
MAX_BATCH: Final = 1_000
"""Most episodes of a model that run again at once."""
MAX_CHANGED: Final = 0.01
"""Largest share of an agent's episodes that may be others when it runs again: float rounding."""
_MAX_SHOWN: Final = 30
_MAX_CHARS: Final = 1_000
_RENDER_AGAIN: Final = "`agent-r1-bench report` writes it again"

Job = tuple[Chunk, Sequence[EpisodeResult]]
"""Episodes of one agent in one environment to be replayed, and what is recorded of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of a verification."""

    problems: Sequence[str]
    """Problems: file, place, field."""
    num_episodes: int = 0
    num_replayed: int = 0
    not_replayed: Mapping[str, str] = field(default_factory=dict)
    """Environments that cannot be made here, and why."""
    own_measure: Mapping[str, str] = field(default_factory=dict)
    """Environments measured otherwise than in the reference, and how."""
    on_trust: Sequence[str] = ()
    """Claims that cannot be checked."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong, and every episode was replayed."""
        return not self.problems and not self.not_replayed

    def summary(self) -> str:
        """Format the result."""
        lines = [visible(text)[:_MAX_CHARS] for text in self.problems[:_MAX_SHOWN]]
        if (more := len(self.problems) - len(lines)) > 0:
            lines.append(f"... and {more} more")
        lines += [f"NOT replayed: {slug}: {why}" for slug, why in self.not_replayed.items()]
        lines += [f"Own measure: {slug}: {how}" for slug, how in self.own_measure.items()]
        lines += [f"On trust: {text}" for text in self.on_trust]
        replayed = f"{self.num_replayed:,} of {self.num_episodes:,} episodes were replayed"
        if self.problems:
            lines.append(f"Verification FAILED: {counted(len(self.problems), 'problem')}.")
        elif self.not_replayed:
            lines.append(f"Verified IN PART: {replayed}; the other scores are claims.")
        else:
            lines.append(f"Verified in full: {replayed}, every score recomputed; nothing is wrong.")
        return "\n".join(lines)


def check_run(
    folder: Path,
    data: Path | None = None,
    *,
    jobs: int = 1,
    is_published: bool = False,
    run: Run | None = None,
    prepare_worker: Callable[[], None] | None = None,
) -> Verification:
    """Verify a run's folder in `jobs` processes.

    With `is_published` the measure must be that of the published run. `run` is the content of the
    folder if it has been read. `prepare_worker` is called in each process that the verification
    starts. `agent_leaderboard.verify.contained` does the same with limits, for runs of strangers.
    """
    if problems := list(check_folder(folder)):
        return Verification(problems=problems)
    board = published()
    try:
        run = run or read_run(folder)
        problems = list(_check_files(folder, run))
    except DataError as error:
        return Verification(problems=[str(error).replace(f"{folder}{os.sep}", "")[:_MAX_CHARS]])
    manifest = run.manifest
    problems += check_names(manifest, board.agents if is_published else ())
    measures = {
        one.slug: "; ".join(board.measure_changes(manifest.protocol, one))
        for one in manifest.environments
    }
    own_measure = {slug: how for slug, how in measures.items() if how}
    for slug, how in own_measure.items() if is_published else ():
        problems.append(f"{MANIFEST}, environment {slug!r}: {how}")
    if list(run.tasks) != list(measures):
        return Verification(problems=[*problems, f"tasks.json: other environments than {MANIFEST}"])
    problems += _check_results(run)
    not_replayed = _check_environments(run, data, problems)
    work = list(_jobs(run, not_replayed, data))
    problems += _replay(work, jobs, prepare_worker)
    has_report = (folder / REPORT).exists() and not problems
    if has_report and read_text(folder / REPORT) != make_markdown(summarise(run)):
        problems = [f"{REPORT}: differs from the results; {_RENDER_AGAIN}"]
    return Verification(
        problems=[text[:_MAX_CHARS] for text in problems[:MAX_PROBLEMS]],
        num_episodes=sum(map(len, run.results.values())),
        num_replayed=sum(len(results) for _, results in work),
        not_replayed=not_replayed,
        own_measure=own_measure,
        on_trust=[
            *_on_trust(run, board, own_measure),
            *([f"{PAGE}: is not verified; {_RENDER_AGAIN}"] if (folder / PAGE).exists() else []),
        ],
    )


# Form


def check_folder(run: Path) -> Iterator[str]:
    """Yield everything in a folder that is not a regular file of a run; opens nothing."""
    try:
        entries = sorted(os.scandir(run), key=lambda entry: entry.name)
    except OSError as error:
        yield f"{run}: cannot be read ({error.strerror})"
        return
    if not any(entry.name == MANIFEST for entry in entries):
        yield f"{run}: is not the folder of a run: it has no {MANIFEST}"
        return
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        is_complete = (run / RESULTS).exists()
        if entry.name == WORK and stat.S_ISDIR(status.st_mode) and not is_complete:
            continue
        if entry.name not in (*FILES, REPORT, PAGE):
            yield f"{ascii(entry.name)[1:-1]}: is not part of a run"
        elif not stat.S_ISREG(status.st_mode):
            yield f"{entry.name}: is not a regular file"
        elif status.st_size > MAX_FILE_BYTES:
            yield f"{entry.name}: is too large"


def _check_files(folder: Path, run: Run) -> Iterator[str]:
    """Yield what is wrong with the form of the manifest, the checksums and the task lists."""
    manifest = run.manifest
    if read_text(folder / MANIFEST) != to_json(manifest):
        yield f"{MANIFEST}: is not in the canonical form"
    recorded, truth = read_checksums(folder), make_checksums(folder)
    for name in sorted(truth.keys() | recorded.keys()):
        if truth.get(name) != recorded.get(name):
            yield f"{ascii(name)[1:-1]}: does not match its checksum in {CHECKSUMS}"
    for environment in manifest.environments:
        entries = run.tasks.get(environment.slug, ())
        listed = len({entry.task for entry in entries}), task_list_sha256(entries)
        if listed != (len(entries), environment.tasks_sha256):
            yield f"tasks.json, {environment.slug!r}: is not the task list of {MANIFEST}"
        if len(entries) != environment.num_tasks:
            yield f"{MANIFEST}, environment {environment.slug!r}, field 'num_tasks': is wrong"
    if not any(environment.num_tasks for environment, _ in manifest.cells):
        yield f"{MANIFEST}: no agent has any task; there is nothing to verify"


def _check_results(run: Run) -> Iterator[str]:
    """Yield episodes that are not those of the task list, in its order, and impossible costs."""
    protocol = run.manifest.protocol
    for environment, agent in run.manifest.cells:
        results = run.results[environment.slug, agent.slug]
        wanted = [(e.task, s) for e, s in list_episodes(run.tasks[environment.slug], protocol)]
        found = [(result.task, result.sample) for result in results]
        for episode, expected in zip_longest(found, wanted):
            if episode != expected:
                task, sample = expected or episode
                yield (
                    f"results.parquet, {environment.slug}/{agent.slug}, task {task}, sample "
                    f"{sample}: is missing, repeated, not listed or not in its place"
                )
                break
        for result in results:
            for text in check_usage(result, agent):
                yield f"{_place(result)}, {text}"


def _place(result: EpisodeResult) -> str:
    name = f"{result.environment}/{result.agent}"
    return f"results.parquet, {name}, task {result.task}, sample {result.sample}"


# Environments


def _check_environments(run: Run, data: Path | None, problems: list[str]) -> dict[str, str]:
    """Return why environments are not replayed; add what is wrong to `problems`."""
    not_replayed: dict[str, str] = {}
    for environment in tqdm(run.manifest.environments, desc="checking tasks", leave=False):
        try:
            found = list(_check_environment(environment, run, data))
        except (MissingExtraError, SandboxUnavailableError) as error:
            not_replayed[environment.slug] = str(error)
            continue
        except Exception as error:  # noqa: BLE001 - any environment
            found = [f"cannot be made: {_reason(error)}"]
        if found:
            not_replayed[environment.slug] = "see above"
            problems += [f"environment {environment.slug!r}: {text}" for text in found]
    return not_replayed


def _check_environment(
    environment: EnvironmentRecord, run: Run, data: Path | None
) -> Iterator[str]:
    """Yield how manifest and task list differ from the environment itself."""
    make_env = recorded_environment(environment, None, data)
    entries = run.tasks[environment.slug]
    seed = run.manifest.protocol.seed
    truth, tasks = complete_record(environment, make_env, count=len(entries), seed=seed, data=data)
    for text in differences(environment, truth):
        yield f"{MANIFEST}, {text}"
    for number, (entry, task) in enumerate(zip(entries, tasks, strict=False), start=1):
        for text in differences(entry, task):
            yield f"tasks.json, entry {number}, {text}"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, AgentEnvsError) else f"{type(error).__name__}: {error}"


# Replay


def _jobs(run: Run, not_replayed: Mapping[str, str], data: Path | None) -> Iterator[Job]:
    for environment, agent in run.manifest.cells:
        if environment.slug in not_replayed:
            continue
        make_env = recorded_environment(environment, agent.tool_format, data)
        entries = {entry.task: entry for entry in run.tasks[environment.slug]}
        every = [one for one in run.results[environment.slug, agent.slug] if one.task in entries]
        protocol, model, size = run.manifest.protocol, None, EPISODES_PER_JOB
        if _is_asked_again(agent):  # in the batches of the run
            model, size = str(TINY_POLICY), min(protocol.concurrency, MAX_BATCH)
        # Local settings could send this machine's keys to a server.
        recorded = dataclasses.replace(agent, settings=recorded_settings(agent))
        settings = complete_settings(recorded, protocol, model)
        for start in range(0, len(every), size):
            results = every[start : start + size]
            yield Chunk(
                environment=environment, agent=agent, make_env=make_env, settings=settings,
                protocol=protocol, data=data,
                episodes=[(entries[one.task], one.sample) for one in results],
            ), results  # fmt: skip


def _is_asked_again(agent: AgentRecord) -> bool:
    """Return whether a model's agent runs again, which may be another episode on another CPU."""
    return is_repeatable(agent) and not acts_by_rules(agent.kind)


def _replay(
    jobs: Sequence[Job], processes: int, prepare_worker: Callable[[], None] | None
) -> Iterator[str]:
    """Replay all jobs; yield what is wrong."""
    asked, changed = Counter[str](), Counter[str]()
    with tqdm(total=sum(len(own) for _, own in jobs), desc="replaying", unit="episode") as bar:
        try:
            for number, (problems, num_changed) in run_all(
                check_episodes, jobs, processes, prepare_worker
            ):
                yield from problems
                chunk, results = jobs[number]
                asked[chunk.agent.slug] += len(results)
                changed[chunk.agent.slug] += num_changed
                bar.update(len(results))
        except (BrokenProcessPool, MemoryError) as error:
            yield f"replay ended ({type(error).__name__}): it needed too much memory or time"
    for slug, num_changed in changed.items():
        if num_changed > MAX_CHANGED * asked[slug]:
            yield f"{slug}: {num_changed} of {asked[slug]} episodes are others when it runs again"


def check_episodes(job: Job) -> tuple[list[str], int]:
    """Replay episodes; return what is wrong, and the number that are others when they run again.

    If any differs, all are replayed once more: a program may reach its time limit on a busy
    machine, and a forgery stays one. A model's episode that runs otherwise is replayed, too.
    """
    chunk, results = job
    check = _rerun if acts_by_rules(chunk.agent.kind) else _replays
    try:
        is_asked = _is_asked_again(chunk.agent)
        num_changed = sum(map(any, map(list, _rerun(chunk, results)))) if is_asked else 0
        if is_asked and not num_changed:
            return [], 0
        first = list(map(list, check(chunk, results)))
        again = list(map(list, check(chunk, results))) if any(first) else first
    except Exception as error:  # noqa: BLE001 - any environment
        return [f"{'/'.join(chunk.cell)}: replay failed: {_reason(error)}"], 0
    found = zip(results, first, again, strict=True)
    problems = [f"{_place(one)}, {text}" for one, texts, more in found if texts for text in more]
    return problems, num_changed


def _rerun(chunk: Chunk, results: Sequence[EpisodeResult]) -> Iterator[Iterable[str]]:
    """Yield how an agent without a model acts otherwise when it runs again."""
    for result, again in zip(results, run_chunk(chunk), strict=True):
        is_fault = None not in (result.error, again.error)  # its message may vary
        error = result.error if is_fault else again.error
        yield differences(result, dataclasses.replace(again, seconds=result.seconds, error=error))


def _replays(chunk: Chunk, results: Sequence[EpisodeResult]) -> Iterator[Iterable[str]]:
    """Yield how episodes of a model differ when their actions are replayed."""
    with closing(Replayer(chunk.environment, chunk.agent, chunk.protocol, chunk.data)) as replayer:
        for result, (entry, _) in zip(results, chunk.episodes, strict=True):
            try:
                again = replayer.replay(result, entry, all_attempts=True)
                yield [
                    *differences(entry, again.entry),
                    *_compare(result, again),
                    *check_strategy(result, chunk.agent, again),
                    *check_tokens(result, chunk.agent, again),
                ]
            except Exception as error:  # noqa: BLE001 - untrusted actions in any environment
                yield [f"field 'actions': replay failed: {error}"]


def _compare(result: EpisodeResult, again: ReplayedEpisode) -> Iterator[str]:
    """Yield each field that differs from replay."""
    rewards = [float(step.reward) for step in again.steps]
    metrics = as_floats(again.last.info.get("metrics", {}))
    truth = dataclasses.replace(
        result,
        rewards=rewards,
        reward_terms=[as_floats(step.info["reward_terms"]) for step in again.steps],
        errors=[step.info["action"].get("error") for step in again.steps],
        metrics=metrics,
        return_=float(sum(rewards)),
        success=metrics.get("success", 0.0) > 0.0,
    )
    yield from differences(result, truth)
    if again.last.terminated:
        allowed = {StopReason.ANSWERED}
    elif again.last.truncated:
        allowed = {StopReason.TURN_LIMIT, StopReason.TOKEN_LIMIT}
    else:  # ended by the policy
        allowed = {StopReason.TOKEN_LIMIT, StopReason.CONTEXT_OVERFLOW, *FAULTS}
    if result.stop_reason not in allowed:
        names = " or ".join(sorted(allowed))
        yield f"field 'stop_reason': is '{result.stop_reason}', not {names}"


# What cannot be checked


def _on_trust(run: Run, board: Manifest, other: Mapping[str, str]) -> Iterator[str]:
    """Yield the claims of a run that cannot be checked; `other` are measured otherwise."""
    manifest = run.manifest
    for agent in manifest.agents:
        own = [one for cell, results in run.results.items() if cell[1] == agent.slug
               for one in results]  # fmt: skip
        if is_custom(agent.kind):
            yield f"{agent.slug}: its code is its author's; others cannot run it"
        elif not is_repeatable(agent):
            tokens = sum(one.prompt_tokens + one.completion_tokens for one in own)
            origin = f", made by '{visible(agent.made_by)[:80]}'," if agent.made_by else ""
            yield (
                f"{agent.slug}: that {visible(str(agent.model))[:80]}{origin} wrote its actions, "
                f"in {sum(one.calls for one in own):,} calls with {tokens:,} tokens "
                f"({'counted again' if is_recounted(agent) else 'not recounted'})"
            )
        if failures := sum(not one.is_scored for one in own):
            yield f"{agent.slug}: {failures} of {len(own)} episodes are infrastructure failures"
        if agent.not_played:
            yield f"{agent.slug}: that it did not run on {', '.join(agent.not_played)}"
    slugs = {environment.slug for environment in manifest.environments}
    missing = [one.slug for one in board.environments if one.slug not in slugs]
    if missing and slugs - other.keys():
        yield f"that the run lacks {', '.join(missing)}, which the board has"
