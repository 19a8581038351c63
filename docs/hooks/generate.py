# ruff: noqa: INP001 - mkdocs loads it by its path
"""What the site takes from the code when it is built, so that it cannot go stale.

Pages: one for each family of environments, their overview, and the root's CHANGELOG.md and
CONTRIBUTING.md. Tables: a page that holds ``<!-- settings: module:Class -->`` gets a table of the
dataclass' own fields there, one that holds ``<!-- environments -->`` a table of all ids.
"""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gymnasium.envs.registration import EnvSpec, load_env_creator
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from agent_envs import ENVIRONMENTS
from agent_envs.catalogue import make_section

ROOT = Path(__file__).parents[2]
SETTINGS = re.compile(r"<!-- settings: (?P<kind>[\w.]+:\w+)(?: only (?P<names>[\w ]+))? -->")
ENVIRONMENT_TABLE = "<!-- environments -->"
FAMILY_FOLDER = "environments/families"
FROM_THE_ROOT = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the families' pages in the navigation, below the other pages on environments."""
    (section,) = [entry["Environments"] for entry in config.nav or [] if "Environments" in entry]
    section += [{title(name): f"{FAMILY_FOLDER}/{name}.md"} for name in families()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code and from the root's documents."""
    pages = {f"{FAMILY_FOLDER}/{name}.md": family_page(name) for name in families()}
    for page, document in FROM_THE_ROOT.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        pages[page] = text.replace("](docs/", "](../")
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables where a page asks for them."""
    markdown = markdown.replace(ENVIRONMENT_TABLE, environment_table())
    return SETTINGS.sub(lambda match: settings_table(match["kind"], match["names"]), markdown)


def families() -> list[str]:
    """Return the names of the families, in the order of the table of environments."""
    return list(dict.fromkeys(map(family, ENVIRONMENTS)))


def family(spec: EnvSpec) -> str:
    """Return the folder below ``agent_envs/envs`` that an environment lives in."""
    return str(spec.entry_point).partition("agent_envs.envs.")[2].split(".")[0]


def title(name: str) -> str:
    """Return the first words of a family's docstring."""
    documentation = inspect.getdoc(importlib.import_module(f"agent_envs.envs.{name}")) or name
    return re.split(r"[.:,(]", documentation)[0]


def family_page(name: str) -> str:
    """Return the page of a family: every environment, as the code describes it."""
    sections = [make_section(spec) for spec in ENVIRONMENTS if family(spec) == name]
    introduction = (
        "Made from the code. Reward terms stand with their default weights; those without one are "
        "off unless `rewards=` names them. Outcome terms are marked with an asterisk. All "
        "environments also take the [shared arguments](../index.md#arguments-that-all-share)."
    )
    return "\n\n".join([f"# {title(name)}", introduction, *sections]) + "\n"


def environment_table() -> str:
    """Return a table of all ids."""
    rows = []
    for spec in ENVIRONMENTS:
        summary = (inspect.getdoc(load_env_creator(str(spec.entry_point))) or "").split("\n\n")[0]
        anchor = re.sub(r"[^\w-]", "", spec.id.lower())
        link = f"[`{spec.id}`](families/{family(spec)}.md#{anchor})"
        rows.append((link, summary.replace("\n", " "), str(spec.max_episode_steps)))
    return table(("id", "what it is", "turns"), rows)


def settings_table(kind: str, names: str | None) -> str:
    """Return a table of a dataclass' fields: those named, else those of its own."""
    module, _, name = kind.partition(":")
    settings = getattr(importlib.import_module(module), name)
    fields = {field.name: field for field in dataclasses.fields(settings)}
    own = [name for name in inspect.get_annotations(settings) if name in fields]  # no ClassVar
    chosen = names.split() if names else own
    return table(("setting", "default", "what it does"), _setting_rows(fields, chosen))


def _setting_rows(fields: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        field = fields[name]
        default = field.default
        if default is dataclasses.MISSING:  # None: a required option
            is_made = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if is_made else None
        shown = "" if default is None else f"`{getattr(default, 'value', default)!r}`"
        yield f"`{name}`", shown, field.metadata.get("help", "")


def table(heads: Sequence[str], rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    escaped = [[" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)
