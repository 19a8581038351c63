"""What a pull request with a run holds: a folder of files, and a text that says what it is."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.play.config import AgentConfig
from agent_leaderboard.records.manifest import AgentRecord, Manifest, make_slug
from agent_leaderboard.records.names import FIELDS
from agent_leaderboard.records.reference import PUBLISHED, published
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.summary import Board, read_run, shown_name, summarise
from agent_leaderboard.report.tables import percent
from agent_leaderboard.report.visible_text import markdown_cell, markdown_table
from agent_leaderboard.verify.verify import check_run

PLACE: Final = "benchmarks/submissions"
"""Where a repository keeps them."""
_WANTED: Final = ("organisation", "licence")
_PLACEHOLDER: Final = re.compile(
    r"(?:my|your|our|some|an?|the)[ _-](?:organi[sz]ation|company|team|lab|model|licen[cs]e)\b.*"
    r"|(?:.*\W)?example\.(?:com|net|org)(?:\W.*)?|<.*>|to ?do|tba|tbd|unknown|[\W_]+|x{2,}",
    re.IGNORECASE,
)
"""What templates and hurried people write where something true is to stand."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What was written."""

    folder: Path
    """The run's files."""
    text: Path
    """The text of the pull request."""


def submit(run: Path, output: Path, data: Path | None, *, jobs: int = 1) -> Submission:
    """Verify a run of the published board and write what is submitted of it below `output`.

    Environments may be missing: a board has holes.

    Raises:
        DataError: If the run is not complete, does not verify, or does not measure as the board.
        ConfigurationError: If an agent does not say whose it is, or the folder is there.
    """
    folder = RunFolder(run)
    manifest = folder.read_manifest()
    folder.read_checksums()  # says so where the run is not complete
    for agent in manifest.agents:
        if problems := list(unfit_fields(agent)):
            raise ConfigurationError(
                f"{run}: agent {agent.name!r} {', and '.join(problems)}. Set it in the agent's "
                "entry of the settings, and run it into a new folder."
            )
    verification = check_run(run, data, jobs=jobs, reference=PUBLISHED)
    if verification.problems:
        raise DataError(f"{run}: does not verify.\n{verification.summary()}")
    target = output / make_slug("-".join(agent.slug for agent in manifest.agents))
    if target.exists():
        raise ConfigurationError(f"{target}: is there already; choose another --output.")
    names = [*folder.expected_files(manifest), folder.checksums_path.name]
    names += [
        path.relative_to(run).as_posix()
        for environment, agent in manifest.cells
        if (path := folder.seconds_path(environment.slug, agent.slug)).exists()
    ]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / name, target / name)
    text = target.with_suffix(".md")
    write_text(text, pull_request_text(summarise(read_run(run)), verification.summary()))
    return Submission(target, text)


def unfit_fields(agent: AgentConfig | AgentRecord) -> Iterator[str]:
    """Yield why an agent cannot be submitted: fields without a value, or with a placeholder."""
    for name in FIELDS:
        text = getattr(agent, name)
        if not text:
            if name in _WANTED:
                yield f"has no {name}"
        elif _PLACEHOLDER.fullmatch(text.strip()):
            yield f"has a placeholder in the field {name!r}, {text!a}"


def pull_request_text(board: Board, verified: str) -> str:
    """Return what a pull request says: title, who, how well, and what was checked."""
    manifest = board.run.manifest
    names = ", ".join(agent.name for agent in manifest.agents)
    head = ["", *(markdown_cell(shown_name(agent)) for agent in manifest.agents)]
    facts = [
        [label, *(_fact(agent, name) for agent in manifest.agents)]
        for label, name in (
            ("organisation", "organisation"),
            ("model", "model"),
            ("licence", "licence"),
            ("more", "url"),
            ("kind", "kind"),
        )
    ]
    facts.append(["money for a million tokens", *map(_prices, manifest.agents)])
    results = [
        [f"`{environment}`", *(_score(board, environment, agent) for agent in board.agents)]
        for environment in board.environments
    ]
    parts = [
        f"# Leaderboard entry: {markdown_cell(names)}",
        f"Adds `{PLACE}/{make_slug('-'.join(board.agents))}/`.",
        markdown_table(head, facts),
        "## Success, in %",
        markdown_table(["environment", *head[1:]], results),
    ]
    lines = [f"- {markdown_cell(o.id)}: {markdown_cell(o.reason)}" for o in manifest.left_out]
    lines += [f"- `{slug}`: not chosen" for slug in _not_chosen(manifest)]
    if lines:
        parts += ["Not played:", "\n".join(lines)]
    parts += [
        "## Verified before it was sent",
        "```text\n" + verified.replace("```", "'''") + "\n```",
        "## I confirm that",
        "- [ ] the agent saw nothing of the tasks but what the environments showed it;\n"
        "- [ ] no episode was chosen, left out or played again but for faults, which are counted;\n"
        "- [ ] the named model wrote the actions, and calls and tokens are all that it took.",
    ]
    return "\n\n".join(parts) + "\n"


def _not_chosen(manifest: Manifest) -> list[str]:
    """Return the board's environments that a run neither holds nor says why it lacks."""
    told = {one.id for one in manifest.left_out} | {one.slug for one in manifest.environments}
    return [one.slug for one in published().environments if not told & {one.id, one.slug}]


def _fact(agent: AgentRecord, name: str) -> str:
    return markdown_cell(str(getattr(agent, name) or "-"))


def _prices(agent: AgentRecord) -> str:
    prices = agent.prices
    if prices is None:
        return "-"
    return (
        f"{prices.prompt:g} read, {prices.completion:g} written, {markdown_cell(prices.currency)}"
    )


def _score(board: Board, environment: str, agent: str) -> str:
    cell = board.cells.get((environment, agent))
    if cell is None:
        return "-"
    score = "-" if cell.success is None else percent(cell.success)
    faults = f", {cell.num_faults} faults" if cell.num_faults else ""
    return f"{score}{faults}, {cell.cost.calls:.1f} calls, {cell.cost.tokens:,.0f} tokens"
