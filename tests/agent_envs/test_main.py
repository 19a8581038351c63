"""The command ``python -m agent_envs``."""

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from agent_envs import ENVIRONMENTS, ToolEnv
from agent_envs.__main__ import main, write_template
from agent_envs.catalogue import INTRODUCTION
from agent_envs.core.command_line import CommandLineParser, errors_of_one_line
from agent_envs.errors import ConfigurationError

ID = "AgentR1/SyntheticMultiHop-v0"


def run(folder, *command):
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def test_a_parser_names_the_module_that_was_called(monkeypatch):
    module = ModuleSpec("package.__main__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", module, raising=False)
    assert CommandLineParser().prog == "python -m package"
    assert CommandLineParser(prog="name").prog == "name"


def test_list_prints_the_page_of_environments(monkeypatch, capsys):
    monkeypatch.setattr("agent_envs.catalogue.ENVIRONMENTS", ENVIRONMENTS[:1])
    main(["list"])
    page = capsys.readouterr().out
    assert page.startswith(f"# The environments\n\n{INTRODUCTION}\n\n## `AgentR1/HotpotQA-v0`\n\n")


@pytest.fixture
def play(capsys):
    def play_lines(*lines):
        typed = iter(lines)

        def ask(prompt):
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        main(["play", ID, "--task", "3"], ask)
        return capsys.readouterr().out

    return play_lines


def test_a_person_solves_a_task_with_the_hints(play):
    shown = play("hint")
    searches = [line.split('"query": "')[1][:-14] for line in shown.splitlines() if "query" in line]
    answer = shown.split("<answer>")[1].split("</answer>")[0]
    shown = play(*(f"search {query.strip()}" for query in searches), f"answer {answer}")
    assert "success 1" in shown
    assert "return 1.2" in shown


def test_a_missing_hint_or_a_wrong_number_ends_no_episode(play, monkeypatch):
    monkeypatch.setattr(ToolEnv, "write_answer", _raise_not_implemented)
    shown = play("hint", "search query=--5", "quit")
    assert "there is no answer" in shown
    assert '"query": "--5"' in shown


def _raise_not_implemented(env, answer):
    raise NotImplementedError("there is no answer")


def test_typed_lines_become_actions_of_a_model(play):
    shown = play("search query=film", "raw <tool_call>", "hm", "help", "quit")
    assert '<tool_call>{"name": "search", "arguments": {"query": "film"}}</tool_call>' in shown
    assert "bad_json" in shown
    assert "no_action" in shown
    assert "name=value" in shown


def test_the_new_environment_passes_the_kit_and_its_own_tests(tmp_path):
    shown = run(tmp_path, "agent_envs", "new", "toy_shop").stdout
    assert "python -m agent_envs check toy_shop:ToyShop-v0" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_toy_shop.py", "toy_shop.py"]
    checked = run(tmp_path, "agent_envs", "check", "toy_shop:ToyShop-v0")
    lines = checked.stdout.splitlines()
    assert (checked.returncode, checked.stderr) == (0, "")
    assert {line[:5] for line in lines} == {"ok   "}
    assert lines[0] == "ok   gymnasium: check_env has no complaint"
    assert lines[-1] == "ok   leaks: no thread and no open file"
    assert "2 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider").stdout


def test_a_failed_check_is_a_line_and_the_exit_code(tmp_path, monkeypatch, capsys):
    module, _ = write_template("slip_env", tmp_path)
    text = module.read_text(encoding="utf-8")
    marker = "    def reference_actions(self)"
    wrong = f"{marker}:\n        return [self.write_answer('no')]\n\n    def unused(self)"
    module.write_text(text.replace(marker, wrong), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(["check", "slip_env:SlipEnv-v0", "--episodes", "1", "--seed", "5"])
    assert "FAIL reference actions: seed 5: after the reference actions success=0.0" in (
        capsys.readouterr().out
    )


def test_new_overwrites_neither_the_module_nor_its_tests(tmp_path):
    module, test = write_template("my_env", tmp_path / "new" / "folder")
    assert test.name == "test_my_env.py"
    module.unlink()
    with pytest.raises(ConfigurationError, match=r"test_my_env\.py exists; nothing was written"):
        write_template("my_env", module.parent)
    assert not module.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "my-env"], "'my-env' cannot name a module"),
        (["new", "json"], "There is a module json already"),
        (["check", "no_such_module:Own-v0"], "No module named 'no_such_module'"),
        (["check", "AgentR1/SyntheticTable-v0", "--env_kwargs", '{"steps": 9}'], "not 9"),
        (["play", "AgentR1/Nothing-v0"], "AgentR1. All ids: python -m agent_envs list"),
        (["play", "CartPole-v1", "--env_kwargs", "{}"], "not an environment with tools"),
        (["check", "broken:X-v0"], "expected ':' (broken.py, line 1)"),
        (["check", ID, "--episodes", "0"], "episodes must be at least 1, not 0"),
        (["check", ID, "--seed", "-1"], "seed must be at least 0, not -1"),
        (["serve", ID, "--port", "70000"], "port must be in [0, 65535], not 70000"),
        (["serve", ID, "--max_sessions", "0"], "max_sessions must be at least 1, not 0"),
        (["serve", ID, "--idle_timeout", "nan"], "idle_timeout must be positive, not nan"),
        (["serve", ID, "--host", "0.0.0.0"], "admits other machines. Set AGENT_ENVS_TOKEN"),
        (["serve", ID, "--host", "192.0.2.1", "--token", "x"], "Choose another --host or --port"),
        (["serve", "AgentR1/Remote-v0"], "missing 1 required positional argument: 'url'"),
        (["serve", "AgentR1/SyntheticMultiHap-v0"], "Did you mean: `SyntheticMultiHop`"),
        (["play", ID, "--env_kwargs", "[]"], "must be a JSON object"),
        (["check", ID, "--env_kwargs", "{"], "--env_kwargs is not valid JSON"),
        (["serve", ID, "--env_kwargs", '{"hop": 1}'], "unexpected keyword argument 'hop'"),
    ],
)
def test_wrong_arguments_are_an_error_of_one_line(arguments, message, tmp_path, monkeypatch):
    pytest.importorskip("websockets", reason="the extra 'serve' is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "broken.py").write_text("class X")
    with pytest.raises(SystemExit) as stopped:
        main(arguments, lambda prompt: "quit")
    assert str(stopped.value).startswith(f"{arguments[0]}: ")
    assert message in str(stopped.value)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.py"]


def test_a_wrong_option_is_an_error_without_the_usage(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve"])
    assert capsys.readouterr().err.splitlines() == [
        "python -m agent_envs serve: the following arguments are required: env",
        "All options: python -m agent_envs serve --help",
    ]


def test_each_attempt_to_reach_the_hub_is_not_logged(caplog):
    http = pytest.importorskip("huggingface_hub.utils._http")
    with errors_of_one_line("play"):
        http.logger.warning("Retrying in 1s")
    assert caplog.records == []


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        main(["serve", ID])
    assert "pip install 'agent-r1[serve]', or in a checkout: pip install '.[serve]'" in str(
        stopped.value
    )
