"""What is installed, and what it does where libraries or systems have less than ours."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest
import yaml

import agent_envs
from tests.conftest import ROOT

PACKAGES = {
    "agent_envs": ROOT / "agent_envs",
    "agent_trainers": ROOT / "agent_trainers",
    "agent_leaderboard": ROOT / "benchmarks" / "agent_leaderboard",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_TRAIN = ("accelerate", "jinja2", "psutil", "torch", "tqdm", "transformers", "trl", "yaml")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
COMMAND = """
import importlib, sys
sys.modules.update(dict.fromkeys({missing!r}))
sys.argv = {argv!r}
getattr(importlib.import_module({module!r}), {function!r})()
"""
OTHER_SYSTEM = """
import importlib, os, pkgutil, signal, socket, sys
for name in {libraries!r}:  # they know their way on every system
    importlib.import_module(name)
from transformers import Trainer, TrainerCallback  # loaded when asked for
sys.modules.update(dict.fromkeys(("resource", "fcntl", "pwd", "grp", "termios")))
sys.platform = "win32"
for module, names in {{
    os: ("fork", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "setsid", "sysconf"),
    signal: ("SIGCHLD", "SIGHUP", "SIGKILL", "SIGUSR1"),
    socket: ("AF_UNIX",),
}}.items():
    for name in names:
        delattr(module, name)
INSIDE = (
    "agent_envs.sandbox.supervisor", "agent_envs.sandbox.usage", "agent_envs.sandbox.zygote",
)  # fmt: skip
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{{name}}."):
        try:
            if module.name not in INSIDE:
                importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name in sys.modules or not module.name.startswith({optional!r}):
                raise
"""


def run_python(program, **options):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, **options
    )


def test_environments_and_the_leaderboard_start_without_heavy_libraries():
    program = """
import sys, gymnasium as gym, agent_envs
gym.make("AgentR1/SyntheticMultiHop-v0").reset(seed=0)
heavy = {"torch", "transformers", "trl", "pandas", "sklearn", "datasets", "pyarrow"}
assert not (loaded := heavy & {*sys.modules}), loaded
import agent_leaderboard.cli, agent_leaderboard.verify.contained
from agent_trainers import Trajectory
assert not (loaded := {"torch", "transformers", "datasets"} & {*sys.modules}), loaded
"""
    result = run_python(program)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_prints_the_version_even_without_its_libraries(command):
    module, function = PROJECT["scripts"][command].split(":")
    argv = [command, "--version"]
    result = run_python(
        COMMAND.format(missing=OF_TRAIN, argv=argv, module=module, function=function)
    )
    assert (result.returncode, result.stdout) == (0, f"{command} {agent_envs.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["alone", "help"])
@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_a_command_without_its_libraries_says_in_one_line_how_to_get_them(command, arguments):
    module, function = PROJECT["scripts"][command].split(":")
    argv = [command, *arguments]
    result = run_python(
        COMMAND.format(missing=OF_TRAIN, argv=argv, module=module, function=function)
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{command} needs ")
    assert line.endswith("pip install 'agent-r1[train]', or in a checkout: pip install '.[train]'")


def test_a_command_does_not_take_a_mistake_of_ours_for_a_missing_library():
    program = "from agent_trainers.cli.commands import run; run('a', 'agent_trainers.nowhere')"
    result = run_python(program)
    assert result.returncode == 1
    assert "No module named 'agent_trainers.nowhere'" in result.stderr


def test_every_module_is_imported_on_windows():
    libraries = ("accelerate", "datasets", "gymnasium", "httpx", "jinja2", "matplotlib.pyplot",
                 "multiprocessing.util", "openai", "psutil", "peft", "rich.console", "torch",
                 "tqdm.auto", "transformers", "trl", "uvicorn", "yaml")  # fmt: skip
    result = run_python(
        OTHER_SYSTEM.format(
            libraries=libraries,
            packages=list(PACKAGES),
            optional=(  # each needs the library that it is for
                "agent_envs.adapters.",
                "agent_trainers.policies.cpu_weights",
                "agent_trainers.trainers.cpu_engine",
            ),
        )
    )
    assert result.returncode == 0, result.stderr


def test_a_wheel_has_the_three_packages_with_their_data_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in PACKAGES.values():
        shutil.copytree(path, source / path.relative_to(ROOT), ignore=ignored)
    (source / "benchmarks" / "learning_run.py").write_text("")  # stays in the checkout
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b; b.build_wheel('..')"
    result = run_python(build, cwd=source)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert installed == expected
    assert {f"{name}/py.typed" for name in PACKAGES} <= installed


def test_an_sdist_has_documentation_examples_tests_and_changelog(tmp_path):
    source, ignored = tmp_path / "source", shutil.ignore_patterns("__pycache__", "*.egg-info")
    folders = ("agent_envs", "docs", "examples", "tests", ".github")
    for name in folders:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    (source / "benchmarks").mkdir()
    files = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "mkdocs.yml", "setup.py"}
    for name in {*files, "pyproject.toml", "MANIFEST.in"}:
        shutil.copy(ROOT / name, source)
    result = run_python("import setuptools.build_meta as b; b.build_sdist('..')", cwd=source)
    assert result.returncode == 0, result.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    copied = {path for name in folders for path in (source / name).rglob("*") if path.is_file()}
    assert {path.relative_to(source).as_posix() for path in copied} <= names
    assert files <= names


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (None, "a guide,  and [TRL](https://x)"),
        (
            "https://a/blob/v1",
            "a [guide](https://a/blob/v1/docs/g.md#b), ![p](https://a/blob/v1/p.png?raw=true) "
            "and [TRL](https://x)",
        ),
    ],
    ids=["without an address", "of a release"],
)
def test_no_link_of_the_index_page_is_relative(address, expected):
    describe = runpy.run_path(str(ROOT / "setup.py"))["describe"]
    assert describe("a [guide](docs/g.md#b), ![p](p.png) and [TRL](https://x)", address) == expected
    readme = describe((ROOT / "README.md").read_text(encoding="utf-8"), address)
    assert re.findall(r"\]\((?!https://)[^)]*", readme) == []


def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == agent_envs.__version__


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_pin_actions_and_only_publishing_gets_an_identity(path):
    text = path.read_text(encoding="utf-8")
    for action in re.findall(r"uses: (.+)", text):
        assert re.fullmatch(r"\./\S+|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"run: make (\w+)", text):
        assert f"\n{target}:" in makefile
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {name: job["permissions"] for name, job in workflow["jobs"].items()
               if "permissions" in job}  # fmt: skip
    assert allowed == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})


def test_every_python_that_the_package_names_is_tested():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert versions == named
