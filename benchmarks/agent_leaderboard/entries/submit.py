"""Start and submit an entry: a template, and the folder and text of a pull request."""

import keyword
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.play.config import AgentConfig
from agent_leaderboard.records.manifest import PUBLISHED, AgentRecord, make_slug, published
from agent_leaderboard.records.names import FIELDS
from agent_leaderboard.records.results import FILES, read_run
from agent_leaderboard.report.board import Board, shown_name, summarise
from agent_leaderboard.report.tables import percent
from agent_leaderboard.report.visible_text import markdown_cell, markdown_table
from agent_leaderboard.verify.verify import check_run

TEMPLATE: Final = Path(__file__).parent / "template"
SUBMISSIONS: Final = "benchmarks/submissions"
"""Folder of submissions in the repository."""
_REQUIRED: Final = ("organisation", "licence")
_PLACEHOLDER: Final = re.compile(
    r"(?:my|your|our|some|an?|the)[ _-](?:organi[sz]ation|company|team|lab|model|licen[cs]e)\b.*"
    r"|(?:.*\W)?example\.(?:com|net|org)(?:\W.*)?|<.*>|to ?do|tba|tbd|unknown|[\W_]+|x{2,}",
    re.IGNORECASE,
)


def write_template(name: str, folder: Path) -> list[Path]:
    """Write a module with an agent, and the file that enters it; return both.

    Raises:
        ConfigurationError: If `name` cannot name a module, or a file exists.
    """
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
        target = folder / path.stem.replace("my_agent", name)
        if target.exists():
            raise ConfigurationError(f"{target} exists; nothing was written.")
        files[target] = text
    for target, text in files.items():
        write_text(target, text)
    return list(files)


@dataclass(frozen=True, slots=True)
class Submission:
    """Paths of a submission."""

    folder: Path
    text: Path
    """The text of the pull request."""


def submit(run: Path, output: Path, data: Path | None, *, jobs: int = 1) -> Submission:
    """Verify a run with the published measure, and write its submission below `output`.

    Environments may be missing.

    Raises:
        DataError: If the run does not verify, or has another measure.
        ConfigurationError: If an agent lacks required fields, or the folder exists.
    """
    finished = read_run(run)
    agents = finished.manifest.agents
    for agent in agents:
        if problems := list(invalid_fields(agent)):
            raise ConfigurationError(
                f"{run}: agent {agent.name!r} {', and '.join(problems)}. Set it in the agent's "
                "entry of the settings, and run it into a new folder."
            )
    verification = check_run(run, data, jobs=jobs, reference=PUBLISHED)
    if verification.problems:
        raise DataError(f"{run}: does not verify.\n{verification.summary()}")
    target = output / make_slug("-".join(agent.slug for agent in agents))
    if target.exists():
        raise ConfigurationError(f"{target}: exists; choose another --output.")
    target.mkdir(parents=True)
    for name in FILES:
        shutil.copyfile(run / name, target / name)
    text = target.with_suffix(".md")
    write_text(text, pull_request_text(summarise(finished), verification.summary()))
    return Submission(target, text)


def invalid_fields(agent: AgentConfig | AgentRecord) -> Iterator[str]:
    """Yield why an agent cannot be submitted: fields without a value, or with a placeholder."""
    for name in FIELDS:
        text = getattr(agent, name)
        if not text:
            if name in _REQUIRED:
                yield f"has no {name}"
        elif _PLACEHOLDER.fullmatch(text.strip()):
            yield f"has a placeholder in the field {name!r}, {text!a}"


def pull_request_text(board: Board, verified: str) -> str:
    """Return the text of a pull request."""
    manifest = board.run.manifest
    agents = manifest.agents
    names = ", ".join(agent.name for agent in agents)
    head = ["", *(markdown_cell(shown_name(agent)) for agent in agents)]
    facts = [
        [label, *(markdown_cell(str(getattr(agent, label) or "-")) for agent in agents)]
        for label in ("organisation", "model", "licence", "url", "kind")
    ]
    facts.append(["prices of a million tokens", *map(_prices, agents)])
    results = [
        [f"`{environment}`", *(_score(board, environment, agent) for agent in board.agents)]
        for environment in board.environments
    ]
    parts = [
        f"# Leaderboard entry: {markdown_cell(names)}",
        f"Adds `{SUBMISSIONS}/{make_slug('-'.join(board.agents))}/`.",
        markdown_table(head, facts),
        "## Success, in %",
        markdown_table(["environment", *head[1:]], results),
    ]
    lines = [f"- {markdown_cell(o.id)}: {markdown_cell(o.reason)}" for o in manifest.left_out]
    listed = {one.id for one in manifest.left_out} | {one.slug for one in manifest.environments}
    lines += [
        f"- `{one.slug}`: not chosen"
        for one in published().environments
        if not listed & {one.id, one.slug}
    ]
    if lines:
        parts += ["Not run:", "\n".join(lines)]
    parts += [
        "## Verification",
        "```text\n" + verified.replace("```", "'''") + "\n```",
        "## I confirm that",
        "- [ ] the agent saw nothing of the tasks but what the environments showed it;\n"
        "- [ ] no episode was selected, left out or repeated, except after infrastructure "
        "failures, which are counted;\n"
        "- [ ] the named model wrote the actions, and calls and tokens are complete.",
    ]
    return "\n\n".join(parts) + "\n"


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
    failures = f", {cell['num_faults']} failures" if cell["num_faults"] else ""
    cost = f"{cell['calls']:.1f} calls, {cell['tokens']:,.0f} tokens"
    return f"{percent(cell['success'])}{failures}, {cost}"
