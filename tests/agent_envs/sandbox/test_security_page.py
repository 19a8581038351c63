"""Each line of what the sandbox promises names a test, and the test is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/project/security.md").read_text()
TESTS = "\n".join(path.read_text() for path in Path(__file__).parents[2].rglob("test_*.py"))


def test_every_promise_names_tests_that_exist():
    table = PAGE.partition("| promise |")[2].partition("\n\n")[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith("|")]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(
            r"`(?:tests/agent_envs/sandbox/)?(test_\w+)(\.py)?`", row.rpartition(" | ")[2]
        )
        assert named, row
        for name, is_file in named:
            exists = (
                (Path(__file__).parent / f"{name}.py").exists()
                if is_file
                else (f"def {name}(" in TESTS)
            )
            assert exists, name


def test_every_test_that_the_page_names_elsewhere_exists():
    for name in re.findall(r"`(test_\w+)`", PAGE):
        assert f"def {name}(" in TESTS, name
