"""The page on the papers lists every numbered item, with code and tests that exist."""

import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "project" / "papers.md"
ITEMS = {  # of arXiv 2511.14460, by version
    "Version 1": {"Equation": 6, "Figure": 4, "Table": 4},
    "Version 2": {"Equation": 13, "Figure": 8, "Table": 2},
}


def rows(version):
    """Yield the cells of a version's table."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {version}")[1].partition("\n## ")[0]
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("| item"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("version", ITEMS)
def test_every_equation_figure_and_table_is_listed(version):
    listed = [item for item, *_ in rows(version) if not item.startswith("Section")]
    assert listed == [f"{kind} {i + 1}" for kind, n in ITEMS[version].items() for i in range(n)]


@pytest.mark.parametrize("version", ITEMS)
def test_what_a_row_names_exists(version):
    tests = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for item, _, code, test, result in rows(version):
        if code.startswith("`"):
            assert pkgutil.resolve_name(code.strip("`")), item
            assert f"def {test.strip('`')}(" in tests, item
        else:  # the text of other rows, or no experiment
            assert code.startswith("as equations") or "Not reproduced" in result, item
        for path in re.findall(r"`((?:benchmarks|docs)/[^`]+)`", result):
            assert (ROOT / path).is_file(), path
