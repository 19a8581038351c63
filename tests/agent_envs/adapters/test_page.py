"""The examples of the documentation, for the libraries that are installed."""

import re
from pathlib import Path

import pytest

from tests.optional_libraries import missing_libraries

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "libraries.md"
SECTIONS = re.compile(r"^## Other trainers and suites$.*(?=^## A custom trainer$)", re.M | re.S)
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.M | re.S)


@pytest.mark.filterwarnings("default")
def test_the_pages_examples_run():
    page = SECTIONS.search(PAGE.read_text(encoding="utf-8"))[0]
    blocks = [match["code"] for match in BLOCK.finditer(page)]
    runnable = [code for code in blocks if not missing_libraries(code)]
    names = {}
    for code in runnable:
        exec(compile(code, str(PAGE), "exec"), names)
    if runnable != blocks:
        pytest.skip(f"{len(blocks) - len(runnable)} examples need what is not installed")
