"""Verify a run: form, checksums, task lists and completeness; then play every episode again.

Whoever changes a file can make its checksum anew. Replay cannot be made to agree: which tasks the
protocol draws, their hashes, rewards, terms, mistakes, metrics and success are recomputed from the
recorded actions in the environment itself, agents without a model are asked once more what they do,
and the pages are made again. What stays on trust is what cannot be asked again, and the summary
says it: that a model wrote these actions, what they cost, and how long they took.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tqdm.auto import tqdm

from agent_envs.errors import AgentEnvsError, DataError, MissingExtraError, SandboxUnavailableError
from agent_leaderboard.agents.agent import acts_by_rules, is_own
from agent_leaderboard.play.processes import run_all
from agent_leaderboard.records.manifest import AgentRecord, Manifest
from agent_leaderboard.records.reference import Reference, published, read_reference
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.uncertainty import MAX_UNSCORED
from agent_leaderboard.report.visible_text import visible
from agent_leaderboard.verify.arguments import check_arguments
from agent_leaderboard.verify.claims import check_names
from agent_leaderboard.verify.environment_check import NotAtHandError, check_environment
from agent_leaderboard.verify.folder_check import (
    check_files,
    check_tree,
    read_results,
    read_tasks,
)
from agent_leaderboard.verify.replay_check import Replayed, ReplayJob, check_lines
from agent_leaderboard.verify.report_check import check_reports, read_board

LINES_PER_JOB: Final = 50
MAX_PROBLEMS: Final = 1_000
_SHOWN: Final = 30
_MAX_CHARS: Final = 500

Cells = Mapping[tuple[str, str], list[tuple[int, ResultLine]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What came of it."""

    problems: Sequence[str]
    """What is wrong: file, line, field, and what. Empty where all is well."""
    num_episodes: int = 0
    """Episodes in the run."""
    num_replayed: int = 0
    """Those that were played again."""
    not_replayed: Mapping[str, str] = field(default_factory=dict)
    """Environments that cannot be played here, and why."""
    own_measure: Mapping[str, str] = field(default_factory=dict)
    """Environments that are measured otherwise than in the reference, and how."""
    scores: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Of each results file: successes by replay, successes by the file, and episodes."""
    on_trust: Sequence[str] = ()
    """What nobody can play again, agent by agent."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong, and every episode was played again."""
        return not self.problems and not self.not_replayed

    def summary(self) -> str:
        """Return it as text."""
        lines = [visible(text)[:_MAX_CHARS] for text in self.problems[:_SHOWN]]
        if (more := len(self.problems) - len(lines)) > 0:
            lines.append(f"... and {more} more")
        lines += [
            f"{name}: {right} of {count} episodes succeed by replay; the file says {says}"
            for name, (right, says, count) in self.scores.items()
            if right != says
        ]
        lines += [f"NOT replayed: {slug}: {why}" for slug, why in self.not_replayed.items()]
        lines += [f"Own measure: {slug}: {how}" for slug, how in self.own_measure.items()]
        lines += [f"On trust: {text}" for text in self.on_trust]
        if self.problems:
            lines.append(f"Verification FAILED: {len(self.problems)} problems.")
            return "\n".join(lines)
        scored = f"{self.num_replayed:,} of {self.num_episodes:,} episodes were replayed"
        if self.not_replayed:
            lines.append(f"Verified IN PART: {scored}; the other scores are claims.")
        else:
            lines.append(f"Verified in full: {scored}, every score recomputed; nothing is wrong.")
        return "\n".join(lines)


def check_run(
    run: Path,
    data: Path | None = None,
    *,
    jobs: int = 1,
    reference: Path | None = None,
    prepare_worker: Callable[[], None] | None = None,
) -> Verification:
    """Check a run's folder in this process; nothing that stands in it is an exception.

    Environments that need the `data` folder are not replayed without; `jobs` processes replay, each
    of which calls `prepare_worker` first. A
    run that measures otherwise than `reference` is wrong; without one it is said how it differs
    from the published one. `agent_leaderboard.verify.contained.verify` is the same within limits.
    """
    folder = RunFolder(run)
    try:
        if problems := list(check_tree(run)):
            return Verification(problems=problems)
        manifest = folder.read_manifest()
        measure = published() if reference is None else read_reference(reference)
        problems = [*check_files(folder, manifest), *check_names(manifest)]
        if not any(environment.num_tasks for environment, _ in manifest.cells):
            problems.append("manifest.json: no agent plays any task; there is nothing to verify")
    except DataError as error:
        return Verification(problems=[str(error)])
    other = _own_measure(manifest, measure)
    if reference is not None:
        problems += [f"manifest.json, environment {slug!r}: {how}" for slug, how in other.items()]
        problems += [f"manifest.json, {text}" for text in measure.taken_names(manifest.agents)]
    cells, not_replayed = _read(folder, manifest, data, problems)
    work = list(_replay_jobs(manifest, cells, not_replayed, data))
    replayed = _replay(work, jobs, problems, prepare_worker)
    if not problems:
        problems += _check_pages(run, data, not_replayed)
    return Verification(
        problems=problems[:MAX_PROBLEMS],
        num_episodes=sum(map(len, cells.values())),
        num_replayed=sum(len(job.lines) for job in work),
        not_replayed=not_replayed,
        own_measure=other,
        scores=_scores(work, replayed),
        on_trust=[
            *(text for agent in manifest.agents for text in _on_trust(agent, cells)),
            *_holes(manifest, measure, other),
        ],
    )


def _own_measure(manifest: Manifest, reference: Reference) -> dict[str, str]:
    found = {
        environment.slug: "; ".join(reference.differences(manifest.protocol, environment))
        for environment in manifest.environments
    }
    return {slug: how for slug, how in found.items() if how}


def _read(
    folder: RunFolder, manifest: Manifest, data: Path | None, problems: list[str]
) -> tuple[Cells, dict[str, str]]:
    """Return the lines of each cell, and why environments cannot be played; note what is wrong."""
    tasks = {e.slug: read_tasks(folder, e, problems) for e in manifest.environments}
    cells = {
        (e.slug, a.slug): read_results(folder, manifest.protocol, e, a, tasks[e.slug], problems)
        for e, a in manifest.cells
    }
    not_replayed: dict[str, str] = {}
    for environment in tqdm(manifest.environments, desc="checking tasks", leave=False):
        slug = environment.slug
        place = f"manifest.json, environment {slug!r}"
        if refused := list(check_arguments(environment.id, environment.kwargs)):
            problems += [f"{place}, {text}" for text in refused]
            not_replayed[slug] = "see above"
            continue
        try:
            problems += check_environment(environment, manifest.protocol, tasks[slug], data)
        except (MissingExtraError, SandboxUnavailableError, NotAtHandError) as error:
            not_replayed[slug] = str(error)
        except Exception as error:  # noqa: BLE001 - environments of all kinds; it is named
            name = "" if isinstance(error, AgentEnvsError) else f"{type(error).__name__}: "
            problems.append(f"{place}: cannot be made: {name}{error}")
            not_replayed[slug] = "see above"
    return cells, not_replayed


# Playing again


def _replay_jobs(
    manifest: Manifest, cells: Cells, not_replayed: Mapping[str, str], data: Path | None
) -> list[ReplayJob]:
    return [
        ReplayJob(
            file=f"results/{slug}/{agent}.jsonl",
            environment=manifest.environment(slug),
            agent=manifest.agent(agent),
            protocol=manifest.protocol,
            lines=own[start : start + LINES_PER_JOB],
            data=data,
        )
        for (slug, agent), own in cells.items()
        if slug not in not_replayed
        for start in range(0, len(own), LINES_PER_JOB)
    ]


def _replay(
    jobs: Sequence[ReplayJob],
    processes: int,
    problems: list[str],
    prepare_worker: Callable[[], None] | None,
) -> dict[int, Replayed]:
    """Return what came of each job, by its number; add what is wrong to `problems`."""
    found: dict[int, Replayed] = {}
    with tqdm(total=sum(len(job.lines) for job in jobs), desc="replaying", unit="episode") as bar:
        try:
            for number, replayed in run_all(check_lines, jobs, processes, prepare_worker):
                found[number] = replayed
                bar.update(len(jobs[number].lines))
        except (BrokenProcessPool, MemoryError) as error:
            missing = sorted({job.file for i, job in enumerate(jobs) if i not in found})
            problems.append(
                f"{missing[0]} and {len(missing) - 1} more: replay ended ({type(error).__name__}): "
                "it took too much memory or time"
            )
    problems += [text for number in sorted(found) for text in found[number].problems]
    return found


def _scores(
    jobs: Sequence[ReplayJob], replayed: Mapping[int, Replayed]
) -> dict[str, tuple[int, int, int]]:
    scores: dict[str, tuple[int, int, int]] = {}
    for number, job in enumerate(jobs):
        right, says, count = scores.get(job.file, (0, 0, 0))
        says += sum(line.success and line.is_scored for _, line in job.lines)
        right += replayed[number].num_right if number in replayed else 0
        scores[job.file] = right, says, count + len(job.lines)
    return scores


def _check_pages(run: Path, data: Path | None, not_replayed: Mapping[str, str]) -> list[str]:
    try:
        return list(check_reports(run, read_board(run), data, not_replayed))
    except AgentEnvsError as error:
        return [f"the pages cannot be made again: {error}"]


def _holes(manifest: Manifest, reference: Reference, other: Mapping[str, str]) -> Iterator[str]:
    """Say what of a board was not played, or was and is not shown: nobody can tell."""
    for agent in manifest.agents:
        if agent.not_played:
            yield f"{agent.slug}: that it did not play {', '.join(agent.not_played)}"
    own = {environment.slug for environment in manifest.environments}
    missing = [one.slug for one in reference.environments if one.slug not in own]
    if missing and own - other.keys():
        yield f"that the run did not play {', '.join(missing)}, which the board has"


def _on_trust(agent: AgentRecord, cells: Cells) -> list[str]:
    """Say what of an agent nobody can ask again."""
    own = {slug: lines for (slug, other), lines in cells.items() if other == agent.slug}
    found = []
    if is_own(agent.kind):
        found.append(f"{agent.slug}: its code is its author's own; nobody can ask it again")
    elif not acts_by_rules(agent.kind):
        calls = sum(line.usage.calls for lines in own.values() for _, line in lines)
        tokens = sum(
            line.usage.prompt_tokens + line.usage.completion_tokens
            for lines in own.values()
            for _, line in lines
        )
        origin = f", made by '{visible(agent.made_by)[:80]}'," if agent.made_by else ""
        found.append(
            f"{agent.slug}: that {visible(str(agent.model))[:80]}{origin} wrote its actions, in "
            f"{calls:,} calls with {tokens:,} tokens (which fit the text)"
        )
    for slug, lines in own.items():
        faults = sum(not line.is_scored for _, line in lines)
        if faults:
            counts = "are left out" if faults <= MAX_UNSCORED * len(lines) else "count as failures"
            found.append(f"{agent.slug} on {slug}: {faults} of {len(lines)} are faults; {counts}")
    return found
