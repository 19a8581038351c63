# ruff: noqa: INP001 - mkdocs loads it by its path
"""Generate pages and tables from the code when the site is built.

Pages: one for each family of environments, their overview, and the root's CHANGELOG.md and
CONTRIBUTING.md. Tables: a page that holds ``<!-- settings: module:Class -->`` gets a table of the
dataclass' own fields there, one that holds ``<!-- environments -->`` a table of all ids, and one
that holds ``<!-- gpu check -->`` or ``<!-- memory -->`` what those commands found.
"""

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gallery import card, needs, table
from gymnasium.envs.registration import EnvSpec, load_env_creator
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import replace_notebooks

from agent_envs import ENVIRONMENTS
from benchmarks.performance import gpu_check, memory

ROOT = Path(__file__).parents[2]
SETTINGS = re.compile(r"<!-- settings: (?P<kind>[\w.]+:\w+)(?: only (?P<names>[\w ]+))? -->")
ENVIRONMENT_TABLE = "<!-- environments -->"
GPU_TABLES = "<!-- gpu check -->"
MEMORY_TABLES = "<!-- memory -->"
FAMILY_FOLDER = "environments/families"
GENERATED = re.compile(
    rf"{FAMILY_FOLDER}/|project/(?:changelog|contributing|results)|"
    r"reference/(?:environments|tools|trainers|rollout|leaderboard)"
)
"""Pages with many words, which a search would find first for nearly all."""
FROM_THE_ROOT = {
    "project/changelog.md": "CHANGELOG.md",
    "project/contributing.md": "CONTRIBUTING.md",
    "project/results.md": "benchmarks/results/README.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the families' pages in the navigation, below the other pages on environments."""
    (section,) = [entry["Environments"] for entry in config.nav or [] if "Environments" in entry]
    section += [{title(name): f"{FAMILY_FOLDER}/{name}.md"} for name in families()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made from the code, the notebooks and the root's documents."""
    pages = {f"{FAMILY_FOLDER}/{name}.md": family_page(name) for name in families()}
    for page, document in FROM_THE_ROOT.items():
        text = (ROOT / document).read_text(encoding="utf-8")
        pages[page] = re.sub(r"\]\((\.\./)*docs/", "](../", text)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for picture in (ROOT / "benchmarks" / "results").glob("*.png"):
        files.append(File.generated(config, f"project/{picture.name}", abs_src_path=str(picture)))
    replace_notebooks(files, config)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put tables where a page asks for them, and rank generated pages below written ones."""
    if GENERATED.match(page.file.src_uri):
        page.meta["search"] = {"boost": 0.05}
    markdown = markdown.replace(ENVIRONMENT_TABLE, environment_table())
    markdown = markdown.replace(GPU_TABLES, gpu_tables())
    markdown = markdown.replace(MEMORY_TABLES, memory_tables())
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
    sections = [card(spec) for spec in ENVIRONMENTS if family(spec) == name]
    introduction = (
        "Generated from the code. Reward terms have their default weights; those without one are "
        "off unless `rewards=` names them. Outcome terms are marked with an asterisk. All "
        "environments also take the [shared arguments](../index.md#shared-arguments). Baselines "
        "are of the published [leaderboard runs](../../project/results.md#leaderboard)."
    )
    return "\n\n".join([f"# {title(name)}", introduction, *sections]) + "\n"


def environment_table() -> str:
    """Return a table of all ids."""
    rows = []
    for spec in ENVIRONMENTS:
        summary = (inspect.getdoc(load_env_creator(str(spec.entry_point))) or "").split("\n\n")[0]
        anchor = re.sub(r"[^\w-]", "", spec.id.lower())
        link = f"[`{spec.id}`](families/{family(spec)}.md#{anchor})"
        rows.append((link, summary.replace("\n", " "), needs(spec), str(spec.max_episode_steps)))
    return table(("id", "task", "needs", "turns"), rows)


def gpu_tables() -> str:
    """Return the measured figures of every device."""
    measured = json.loads((ROOT / gpu_check.RESULTS).read_text(encoding="utf-8"))
    return "\n\n".join(
        f"{name}, {entry['model']}, {entry['date']}:\n\n{gpu_check.table(entry)}"
        for name, entry in measured.items()
    )


def memory_tables() -> str:
    """Return the check of the predicted memory, and the predictions."""
    found = json.loads((ROOT / memory.RESULTS).read_text(encoding="utf-8"))
    return f"{memory.check_table(found['checked'])}\n\n{memory.size_table(found['sizes'])}"


def settings_table(kind: str, names: str | None) -> str:
    """Return a table of a dataclass' fields: those named, else those that it declares."""
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
