"""Every code block of README and docs: Python runs, commands are ones that exist."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import agent_envs.__main__
from agent_leaderboard import cli as leaderboard
from agent_leaderboard.play.config import load_configs
from agent_trainers.cli import sft
from agent_trainers.cli.arguments import CommandParser
from agent_trainers.cli.evaluate import CollectArguments, EvaluateArguments
from agent_trainers.cli.train import make_parser
from agent_trainers.experimental import reward_model
from agent_trainers.experimental.diagnose import DiagnoseArguments, name_file
from agent_trainers.experimental.search import SearchArguments
from agent_trainers.experimental.values import ValueArguments
from benchmarks.credit.__main__ import CreditArguments
from benchmarks.papers_real.cells import PapersRealArguments
from benchmarks.papers_table import PapersTableArguments
from tests.optional_libraries import missing_libraries

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^ *```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^ *```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
"""The first line of a block that is a file."""
OTHER_PROGRAMS = {"pip", "vllm", ".ci/run"}
PYTHON = Sybil([PythonCodeBlockParser()])


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return [match["code"] for match in BLOCK.finditer(text) if match["language"] == language]


def commands(page):
    """Yield the words of every command in the page's shell blocks."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("default")  # a reader's Python does not turn warnings into errors
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for block in [*blocks(page, "python"), *blocks(page, "yaml")]:
        if name := FILE_NAME.match(block):
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    for example in PYTHON.parse(page).examples():
        # Those of other trainers and suites run in tests/agent_envs/adapters/test_page.py, too.
        if not FILE_NAME.match(example.parsed) and not missing_libraries(example.parsed):
            example.evaluate()


@pytest.fixture(autouse=True)
def no_traces():
    """Forget the modules and environments of a page."""
    modules, environments = set(sys.modules), dict(gym.registry)
    yield
    for name in set(sys.modules) - modules:
        if "pytest-of" in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    gym.registry.clear()
    gym.registry.update(environments)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_files_and_settings_that_a_page_names_exist(page, tmp_path):
    for words in commands(page):
        check_command(words)
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:agent_\w+|benchmarks|docs|examples|tests)/[\w./-]*)`", text):
        assert (ROOT / path).exists() or (ROOT / "benchmarks" / path).exists(), path
    if names := set(re.findall(r"`(test_\w+)`", text)):
        sources = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
        assert names <= set(re.findall(r"def (test_\w+)", "".join(sources)))
    if page == ROOT / "docs" / "reference" / "files.md":
        (block,) = blocks(page, "yaml")
        (tmp_path / "board.yaml").write_text(block, encoding="utf-8")
        assert load_configs([tmp_path / "board.yaml"]).agents


@pytest.mark.parametrize("command", [
    "agent-r1-train --learning_rat 1", "agent-r1-eval --max_steps 1", "agent-r1-bench plai",
    "python -m agent_envs plai", "make dem", "python examples/none.py", "rm -rf runs",
])  # fmt: skip
def test_a_command_that_does_not_exist_is_found(command):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command))


OPTIONS_OF = {
    "agent-r1-eval": EvaluateArguments,
    "agent-r1-eval collect": CollectArguments,
    "agent_trainers.experimental.diagnose": DiagnoseArguments,
    **{
        f"agent_trainers.experimental.reward_model {name}": kind
        for name, (_, kind) in reward_model.COMMANDS.items()
    },
    "agent_trainers.experimental.search": SearchArguments,
    "agent_trainers.experimental.values": ValueArguments,
    "benchmarks.credit": CreditArguments,
    "benchmarks.papers_real": PapersRealArguments,
    "benchmarks.papers_table": PapersTableArguments,
}


def check_command(words):  # noqa: C901, PLR0912
    program, *arguments = words
    if words[:2] == ["agent-r1-eval", "collect"]:
        program, arguments = " ".join(words[:2]), words[2:]
    if arguments[:2] == ["-m", reward_model.__name__]:
        arguments[1:3] = [" ".join(arguments[1:3])]
    if arguments[:1] == ["-m"] and arguments[1] in OPTIONS_OF:
        program, *arguments = arguments[1:]
    if program == "agent-r1-train":
        make_parser(arguments).read(arguments)
    elif program == "agent-r1-sft":
        sft.make_parser(arguments).read(arguments)
    elif program in OPTIONS_OF:
        if program.startswith("agent_trainers.experimental"):
            arguments = name_file(arguments)
        CommandParser((OPTIONS_OF[program],), program=program).read(arguments)
    elif program == "agent-r1-bench" or arguments[:2] == ["-m", "agent_leaderboard"]:
        given = arguments if program == "agent-r1-bench" else arguments[2:]
        given = given if given and not given[0].startswith("-") else ["run", *given]
        leaderboard._parser().parse_args(given)
    elif arguments[:2] == ["-m", "agent_envs"]:
        agent_envs.__main__._parser().parse_args(arguments[2:])
    elif program == "python" and arguments[0] == "-m":
        is_other = arguments[1].partition(".")[0] in OTHER_PROGRAMS
        assert is_other or importlib.util.find_spec(arguments[1]), arguments[1]
    elif program == "python":
        assert (ROOT / arguments[0]).is_file(), arguments[0]
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
    else:
        assert program in OTHER_PROGRAMS, program
