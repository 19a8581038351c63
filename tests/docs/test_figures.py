"""Figures that README and pages repeat are those of the code and of the results."""

import json
import re
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from agent_envs import ENVIRONMENTS
from agent_trainers import TINY_POLICY
from agent_trainers.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", TINY_POLICY / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = ROOT / "benchmarks" / "results" / "README.md"


def number_of_parameters():
    with safe_open(TINY_POLICY / "model.safetensors", "np") as weights:
        return sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118


def vocabulary():
    return json.loads((TINY_POLICY / "config.json").read_text())["vocab_size"]


def kept_checkpoints():
    recipe = yaml.safe_load(RECIPES["default"].read_text())
    every, last = recipe["save_steps"], recipe["max_steps"]
    steps = sorted({*range(every, last, every), last})
    return ", ".join(f"`checkpoint-{step}`" for step in steps[-recipe["save_total_limit"] :])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"\[(\d+) environments\]\(ENVIRONMENTS\.md\)", lambda: str(len(ENVIRONMENTS))),
        (r"model of ([\d,]+) parameters", lambda: f"{number_of_parameters():,}"),
        (r"0\.(\d+)(?: million| M)[ -]parameters?\b(?! then)", number_of_parameters),
        (r"embedded policy has (\d+) tokens", lambda: str(vocabulary())),
        (r"((?:`checkpoint-\d+`(?:, )?)+) \| the checkpoints", kept_checkpoints),
    ],
    ids=["environments", "parameters", "millions", "vocabulary", "checkpoints"],
)
def test_a_repeated_figure_is_that_of_the_code(pattern, expected):
    value = expected()
    found = [
        (page.relative_to(ROOT), figure)
        for page in PAGES
        for figure in re.findall(pattern, page.read_text(encoding="utf-8"))
    ]
    assert found, "no page states the figure any more: remove the pattern"
    for page, figure in found:
        if isinstance(value, int):  # in millions, rounded to the decimals that are stated
            assert figure == f"{value / 1e6:.{len(figure)}f}".partition(".")[2], page
        else:
            assert figure == value, page


def test_each_percentage_of_the_readme_is_a_dated_result():
    results = RESULTS.read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [x for x in re.findall(r"[\d.]+ %", readme) if x not in results] == []
