"""The documentation site builds without a warning, from the code as it is, and offline."""

import dataclasses
import inspect
import logging
import re
from pathlib import Path

import pytest

from agent_envs import ENVIRONMENTS
from agent_trainers.trainers.config import StepGRPOConfig

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?P<src>[^\s\">]+)|"
                    r"<link[^>]*rel=\"?stylesheet[^>]*href=\"?(?P<href>[^\s\">]+)")  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocstrings", reason="needs the dependency group 'docs'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
        config.plugins.on_startup(command="build", dirty=False)
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert warnings == []
    return folder


def read(site, page):
    return (site / page).read_text(encoding="utf-8")


def test_every_environment_has_a_place_on_a_page(site):
    overview = read(site, "environments/index.html")
    for spec in ENVIRONMENTS:
        (link,) = re.findall(rf'<a href="(families/[^"]+)"><code>{spec.id}<', overview)
        page, _, anchor = link.partition("#")
        assert f'id="{anchor}"' in read(site, f"environments/{page}")


def test_a_card_shows_arguments_baselines_and_a_transcript(site):
    page = read(site, "environments/families/synthetic.html")
    card = page[page.index('id="agentr1syntheticmultihop-v0"') :].partition("<h2")[0]
    text = re.sub(r"<[^>]+>", "", card)
    assert "Number of facts that lead to each answer, 1 to 4." in text
    assert "random 0.0 [0.0, 3.6]; oracle 100.0 [96.4, 100.0]; SmolLM2 0.0" in text
    assert "[end] success 1" in text


def test_every_setting_of_ours_stands_in_a_table(site):
    page = read(site, "reference/configuration.html")
    own = inspect.get_annotations(StepGRPOConfig)
    for name in own.keys() & {field.name for field in dataclasses.fields(StepGRPOConfig)}:
        assert f"<code>{name}</code>" in page


def test_the_search_index_is_a_script_that_works_from_disk(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "reward hacking" in index
    assert 'src="../js/iframe-worker.js"' in read(site, "howto/tools.html")


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        for match in LOADED.finditer(page.read_text(encoding="utf-8")):
            assert "//" not in (match["src"] or match["href"]), page
