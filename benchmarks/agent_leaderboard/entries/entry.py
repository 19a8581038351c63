"""Enter the board: a template, the folder and text of a pull request, and merged runs."""

import keyword
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import (
    MEASURED_FIELDS,
    ORIGIN,
    AgentRecord,
    LeftOut,
    Manifest,
    differences,
    make_slug,
    published,
)
from agent_leaderboard.records.names import FIELDS, misleading_names
from agent_leaderboard.records.reading import read_bytes
from agent_leaderboard.records.results import FILES, EpisodeResult, Run, read_run, write_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import make_markdown
from agent_leaderboard.report.visible_text import markdown_cell
from agent_leaderboard.verify.verify import Verification, check_folder, check_run

TEMPLATE: Final = Path(__file__).parent / "template"
SUBMISSIONS: Final = "benchmarks/submissions"
"""Folder of submissions in the repository."""
_REQUIRED: Final = ("organisation", "licence")
_PLACEHOLDER: Final = re.compile(
    r"(?:my|your|our|some|an?|the)[ _-](?:organi[sz]ation|company|team|lab|model|licen[cs]e)\b.*"
    r"|(?:.*\W)?example\.(?:com|net|org)(?:\W.*)?|<.*>|to ?do|tba|tbd|unknown|[\W_]+|x{2,}",
    re.IGNORECASE,
)
_CONFIRM: Final = """## I confirm that

- [ ] the agent saw nothing of the tasks but what the environments showed it;
- [ ] no episode was selected, left out or repeated, except after infrastructure failures, which \
are counted;
- [ ] the named model wrote the actions, and calls and tokens are complete.
"""


def write_template(name: str, folder: Path) -> list[Path]:
    """Write a module with an agent, and the file that enters it; return both."""
    if not (name.isidentifier() and name.islower()) or keyword.iskeyword(name):
        raise ConfigurationError(f"{name!r} cannot name a module; use a name like my_agent.")
    words = {
        "MyAgent": "".join(word.capitalize() for word in name.split("_")),
        "my_agent": name,
        "my agent": name.replace("_", " ").strip(),
    }
    files = {}
    for path in sorted(TEMPLATE.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        for old, new in words.items():
            text = text.replace(old, new)
        files[folder / path.stem.replace("my_agent", name)] = text
    for target in files:
        if target.exists():
            raise ConfigurationError(f"{target} exists; nothing was written.")
    for target, text in files.items():
        write_text(target, text)
    return list(files)


# Submit


def submit(folder: Path, output: Path, data: Path | None, *, jobs: int = 1) -> Path:
    """Verify a run with the published measure, and write its submission below `output`.

    Environments may be missing. Returns the folder; the text of the pull request is next to it.
    """
    run = read_run(folder)
    agents = run.manifest.agents
    target = output / make_slug("-".join(agent.slug for agent in agents))
    if target.exists():
        raise ConfigurationError(f"{target}: exists; choose another --output.")
    for agent in agents:
        for problem in invalid_fields(agent):
            raise ConfigurationError(
                f"{folder}: agent {agent.name!r} {problem}. Set it in the agent's entry of the "
                "settings, and run it into a new folder."
            )
    verification = check_run(folder, data, jobs=jobs, is_published=True, run=run)
    if verification.problems:
        raise DataError(f"{folder}: does not verify.\n{verification.summary()}")
    copy_run(folder, target)
    parts = [
        f"# Leaderboard entry: {', '.join(markdown_cell(agent.name) for agent in agents)}",
        f"Adds `{SUBMISSIONS}/{target.name}/`.",
        "\n".join(_facts(run.manifest)),
        "#" + make_markdown(summarise(run)).strip(),
        "## Verification",
        "```text\n" + verification.summary().replace("```", "'''") + "\n```",
        _CONFIRM,
    ]
    write_text(target.with_suffix(".md"), "\n\n".join(parts))
    return target


def _facts(manifest: Manifest) -> Iterator[str]:
    """Yield who enters what, and what was not run."""
    for agent in manifest.agents:
        for name in (*FIELDS, "kind", "prices"):
            yield f"- {name}: {markdown_cell(str(getattr(agent, name) or '-'))}"
    listed = {one.id for one in manifest.left_out} | {one.slug for one in manifest.environments}
    for one in published().environments:
        if not listed & {one.id, one.slug}:
            yield f"- `{one.slug}`: not chosen"


def invalid_fields(agent: AgentRecord) -> Iterator[str]:
    """Yield why an agent cannot be submitted: fields without a value, or with a placeholder."""
    for name in FIELDS:
        text = getattr(agent, name)
        if not text and name in _REQUIRED:
            yield f"has no {name}"
        elif text and _PLACEHOLDER.fullmatch(text.strip()):
            yield f"has a placeholder in the field {name!r}, {text!a}"


def copy_run(run: Path, folder: Path) -> None:
    """Copy the files of a complete run, and nothing else, into a new folder."""
    for problem in check_folder(run):
        raise DataError(f"{run}: {problem}.")
    contents = {name: read_bytes(run / name) for name in FILES}
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


# Merge


def merge(
    output: Path,
    folders: Sequence[Path],
    data: Path | None,
    verify: Callable[..., Verification],
    **options: Any,
) -> Path:
    """Verify copies of runs, and merge them into a new one; return its folder."""
    if output.exists():
        raise ConfigurationError(f"{output}: exists; choose a new folder.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".merge-") as scratch:
        runs = {}
        for number, original in enumerate(folders):
            copy = Path(scratch) / str(number)
            copy_run(original, copy)
            found = verify(copy, data, **options)
            if not found.is_whole:
                raise DataError(f"{original}: cannot be verified here.\n{found.summary()}")
            runs[original] = read_run(copy)
        joined = Path(scratch) / "joined"
        joined.mkdir()
        write_run(joined, merge_runs(runs))
        joined.rename(output)
    return output


def merge_runs(runs: Mapping[Path, Run]) -> Run:
    """Merge the agents of several runs on all environments; they need not have run on all."""
    first, model = next((folder, run.manifest) for folder, run in runs.items())
    environments: dict[str, Any] = {}
    agents: dict[str, Any] = {}
    tasks = {slug: own for run in runs.values() for slug, own in run.tasks.items()}
    results: dict[tuple[str, str], Sequence[EpisodeResult]] = {}
    left_out: dict[LeftOut, None] = {}
    for folder, run in runs.items():
        measure = differences(run.manifest.protocol, model.protocol, MEASURED_FIELDS)
        changes = [f"protocol, {text}" for text in measure]
        for kind, known, own, ignored in (
            ("environment", environments, run.manifest.environments, {"contamination": ""}),
            ("agent", agents, run.manifest.agents, {"not_played": [], **dict.fromkeys(ORIGIN)}),
        ):
            for record in own:
                expected = replace(known.setdefault(record.slug, record), **ignored)
                found = differences(replace(record, **ignored), expected)
                changes += [f"{kind} {record.slug!r}, {text}" for text in found]
        for cell, episodes in run.results.items():
            if _without_seconds(results.setdefault(cell, episodes)) != _without_seconds(episodes):
                changes.append(f"agent {cell[1]!r}: acts otherwise on {cell[0]}")
        for text in changes:
            raise DataError(f"{folder}: does not fit {first}: {text}.")
        left_out |= dict.fromkeys(run.manifest.left_out)
    for text in misleading_names(agents.values()):
        raise DataError(f"{', '.join(map(str, runs))}: cannot be merged: {text}.")
    filled = {environment.id for environment in environments.values()}
    manifest = replace(
        model,
        environments=list(environments.values()),
        agents=[
            replace(agent, not_played=[e for e in environments if (e, slug) not in results])
            for slug, agent in agents.items()
        ],
        left_out=[one for one in left_out if one.id not in filled],
    )
    return Run(
        manifest=manifest, tasks={slug: tasks[slug] for slug in environments}, results=results
    )


def _without_seconds(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    return [replace(result, seconds=None) for result in results]
