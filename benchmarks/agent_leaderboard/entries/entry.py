"""Enter the board: a template, and the folder and text of a pull request."""

import keyword
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent_envs.data.files import write_text
from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.records.manifest import (
    AgentRecord,
    Manifest,
    make_slug,
    published,
)
from agent_leaderboard.records.names import FIELDS
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import make_markdown
from agent_leaderboard.report.visible_text import markdown_cell
from agent_leaderboard.verify.merging import copy_run
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
    finished = read_run(folder)
    agents = finished.manifest.agents
    for agent in agents:
        for problem in invalid_fields(agent):
            raise ConfigurationError(
                f"{folder}: agent {agent.name!r} {problem}. Set it in the agent's entry of the "
                "settings, and run it into a new folder."
            )
    verification = check_run(folder, data, jobs=jobs, is_published=True)
    if verification.problems:
        raise DataError(f"{folder}: does not verify.\n{verification.summary()}")
    target = output / make_slug("-".join(agent.slug for agent in agents))
    if target.exists():
        raise ConfigurationError(f"{target}: exists; choose another --output.")
    copy_run(folder, target)
    parts = [
        f"# Leaderboard entry: {', '.join(markdown_cell(agent.name) for agent in agents)}",
        f"Adds `{SUBMISSIONS}/{target.name}/`.",
        "\n".join(_facts(finished.manifest)),
        "#" + make_markdown(summarise(finished)).strip(),
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
