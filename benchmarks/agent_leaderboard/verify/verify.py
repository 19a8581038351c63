"""Verification of a run: form, completeness, task lists, then replay of every episode.

Checksums can be forged; replay cannot. Drawn tasks, their hashes, rewards, terms, errors, metrics
and success are recomputed from the recorded actions in the environment itself, agents without a
model run again, and tables are made again. The summary names what stays on trust: that a model
wrote these actions, and what they cost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from agent_envs.errors import AgentEnvsError, DataError, MissingExtraError, SandboxUnavailableError
from agent_leaderboard.agents.agent import acts_by_rules, is_custom
from agent_leaderboard.play.environments import refused_arguments
from agent_leaderboard.play.run import run_all
from agent_leaderboard.records.manifest import (
    AgentRecord,
    Manifest,
    Reference,
    published,
    read_versioned,
)
from agent_leaderboard.records.reading import read_text
from agent_leaderboard.records.results import Run, read_run
from agent_leaderboard.report.board import MAX_UNSCORED, summarise
from agent_leaderboard.report.tables import PAGES, REPORTS
from agent_leaderboard.report.visible_text import visible
from agent_leaderboard.verify.claims import check_names
from agent_leaderboard.verify.replay_check import Replayed, ReplayJob, check_episodes
from agent_leaderboard.verify.run_check import (
    MissingDataError,
    check_environment,
    check_files,
    check_folder,
    check_results,
)

EPISODES_PER_JOB: Final = 50
MAX_PROBLEMS: Final = 1_000
_MAX_SHOWN: Final = 30
_MAX_CHARS: Final = 500


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
    scores: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """By ``environment/agent``: successes by replay, recorded successes, episodes."""
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
        lines += [
            f"{name}: {right} of {count} episodes succeed by replay, {recorded} are recorded"
            for name, (right, recorded, count) in self.scores.items()
            if right != recorded
        ]
        lines += [f"NOT replayed: {slug}: {why}" for slug, why in self.not_replayed.items()]
        lines += [f"Own measure: {slug}: {how}" for slug, how in self.own_measure.items()]
        lines += [f"On trust: {text}" for text in self.on_trust]
        replayed = f"{self.num_replayed:,} of {self.num_episodes:,} episodes were replayed"
        if self.problems:
            lines.append(f"Verification FAILED: {len(self.problems)} problems.")
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
    reference: Path | None = None,
    prepare_worker: Callable[[], None] | None = None,
) -> Verification:
    """Check a run's folder in this process; its content raises no exception.

    `jobs` processes replay, each of which calls `prepare_worker` first. A run that measures
    otherwise than `reference` is wrong; without one, differences from the published run are
    reported. `agent_leaderboard.verify.contained.verify` does the same within limits.
    """
    try:
        if problems := list(check_folder(folder)):
            return Verification(problems=problems)
        run = read_run(folder)
        expected = published() if reference is None else read_versioned(Reference, reference)
        problems = [*check_files(folder, run), *check_names(run.manifest)]
    except DataError as error:
        return Verification(problems=[str(error).replace(f"{folder}/", "")])
    manifest = run.manifest
    if not any(environment.num_tasks for environment, _ in manifest.cells):
        problems.append("manifest.json: no agent has any task; there is nothing to verify")
    other = _own_measure(manifest, expected)
    if reference is not None:
        problems += [f"manifest.json, environment {slug!r}: {how}" for slug, how in other.items()]
        problems += [f"manifest.json, {text}" for text in expected.taken_names(manifest.agents)]
    not_replayed = _check_environments(run, data, problems)
    if any(e.slug not in run.tasks for e in manifest.environments):
        return Verification(problems=problems[:MAX_PROBLEMS])
    problems += check_results(run)
    work = list(_replay_jobs(run, not_replayed, data))
    replayed = _replay(work, jobs, problems, prepare_worker)
    if not problems:
        problems += _check_reports(folder, run)
    return Verification(
        problems=problems[:MAX_PROBLEMS],
        num_episodes=sum(map(len, run.results.values())),
        num_replayed=sum(len(job.episodes) for job in work),
        not_replayed=not_replayed,
        own_measure=other,
        scores=_scores(work, replayed),
        on_trust=[
            *(text for agent in manifest.agents for text in _on_trust(agent, run)),
            *_holes(manifest, expected, other),
            *(f"{name}: pages are not verified; `agent-r1-bench report` renders them again"
              for name in PAGES if (folder / name).exists()),
        ],
    )  # fmt: skip


def _own_measure(manifest: Manifest, reference: Reference) -> dict[str, str]:
    found = {
        environment.slug: "; ".join(reference.differences(manifest.protocol, environment))
        for environment in manifest.environments
    }
    return {slug: how for slug, how in found.items() if how}


def _check_environments(run: Run, data: Path | None, problems: list[str]) -> dict[str, str]:
    """Return why environments cannot be replayed; add what is wrong to `problems`."""
    not_replayed: dict[str, str] = {}
    protocol = run.manifest.protocol
    for environment in tqdm(run.manifest.environments, desc="checking tasks", leave=False):
        slug = environment.slug
        place = f"manifest.json, environment {slug!r}"
        if refused := list(refused_arguments(environment.id, environment.kwargs)):
            problems += [f"{place}, {text}" for text in refused]
            not_replayed[slug] = "see above"
            continue
        try:
            tasks = run.tasks.get(slug, ())
            problems += check_environment(environment, protocol, tasks, data)
        except (MissingExtraError, SandboxUnavailableError, MissingDataError) as error:
            not_replayed[slug] = str(error)
        except Exception as error:  # noqa: BLE001 - any environment
            name = "" if isinstance(error, AgentEnvsError) else f"{type(error).__name__}: "
            problems.append(f"{place}: cannot be made: {name}{error}")
            not_replayed[slug] = "see above"
    return not_replayed


# Replay


def _replay_jobs(
    run: Run, not_replayed: Mapping[str, str], data: Path | None
) -> Iterator[ReplayJob]:
    for environment, agent in run.manifest.cells:
        if environment.slug in not_replayed:
            continue
        entries = {entry.task: entry for entry in run.tasks[environment.slug]}
        episodes = [
            (result, entries[result.task])
            for result in run.results[environment.slug, agent.slug]
            if result.task in entries
        ]
        for start in range(0, len(episodes), EPISODES_PER_JOB):
            yield ReplayJob(
                environment=environment,
                agent=agent,
                protocol=run.manifest.protocol,
                episodes=episodes[start : start + EPISODES_PER_JOB],
                data=data,
            )


def _replay(
    jobs: Sequence[ReplayJob],
    processes: int,
    problems: list[str],
    prepare_worker: Callable[[], None] | None,
) -> dict[int, Replayed]:
    """Return the result of each job, by its number; add what is wrong to `problems`."""
    found: dict[int, Replayed] = {}
    total = sum(len(job.episodes) for job in jobs)
    with tqdm(total=total, desc="replaying", unit="episode") as bar:
        try:
            for number, replayed in run_all(check_episodes, jobs, processes, prepare_worker):
                found[number] = replayed
                bar.update(len(jobs[number].episodes))
        except (BrokenProcessPool, MemoryError) as error:
            missing = sorted({job.name for i, job in enumerate(jobs) if i not in found})
            problems.append(
                f"{missing[0]} and {len(missing) - 1} more: replay ended ({type(error).__name__}): "
                "it needed too much memory or time"
            )
    problems += [text for number in sorted(found) for text in found[number].problems]
    return found


def _scores(
    jobs: Sequence[ReplayJob], replayed: Mapping[int, Replayed]
) -> dict[str, tuple[int, int, int]]:
    scores: dict[str, tuple[int, int, int]] = {}
    for number, job in enumerate(jobs):
        right, recorded, count = scores.get(job.name, (0, 0, 0))
        recorded += sum(result.success and result.is_scored for result, _ in job.episodes)
        right += replayed[number].num_successes if number in replayed else 0
        scores[job.name] = right, recorded, count + len(job.episodes)
    return scores


def _check_reports(folder: Path, run: Run) -> Iterator[str]:
    """Yield tables that differ from those of the results."""
    names = [name for name in REPORTS if (folder / name).exists()]
    board = summarise(run) if names else None
    for name in names:
        if board is not None and read_text(folder / name) != REPORTS[name](board):
            yield f"{name}: differs from the results; `agent-r1-bench report` writes it again"


# What cannot be checked


def _holes(manifest: Manifest, reference: Reference, other: Mapping[str, str]) -> Iterator[str]:
    """Yield what a board has and the run lacks: whether it was run is unknown."""
    for agent in manifest.agents:
        if agent.not_played:
            yield f"{agent.slug}: that it did not run on {', '.join(agent.not_played)}"
    own = {environment.slug for environment in manifest.environments}
    missing = [one.slug for one in reference.environments if one.slug not in own]
    if missing and own - other.keys():
        yield f"that the run lacks {', '.join(missing)}, which the board has"


def _on_trust(agent: AgentRecord, run: Run) -> Iterator[str]:
    """Yield the claims of an agent that cannot be checked."""
    own = {slug: results for (slug, name), results in run.results.items() if name == agent.slug}
    every = [result for results in own.values() for result in results]
    if is_custom(agent.kind):
        yield f"{agent.slug}: its code is its author's; others cannot run it"
    elif not acts_by_rules(agent.kind):
        calls = sum(result.calls for result in every)
        tokens = sum(result.prompt_tokens + result.completion_tokens for result in every)
        origin = f", made by '{visible(agent.made_by)[:80]}'," if agent.made_by else ""
        yield (
            f"{agent.slug}: that {visible(str(agent.model))[:80]}{origin} wrote its actions, in "
            f"{calls:,} calls with {tokens:,} tokens (which fit the text)"
        )
    for slug, results in own.items():
        if failures := sum(not result.is_scored for result in results):
            is_few = failures <= MAX_UNSCORED * len(results)
            counts = "are left out" if is_few else "count as failures"
            yield (
                f"{agent.slug} on {slug}: {failures} of {len(results)} are infrastructure "
                f"failures; {counts}"
            )
