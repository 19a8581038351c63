from pathlib import Path

import gymnasium as gym
import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.catalogue import INTRODUCTION, main, make_page
from agent_envs.errors import MissingExtraError, SandboxUnavailableError

PAGE = Path(__file__).parents[2] / "ENVIRONMENTS.md"


def test_the_page_is_what_the_environments_declare():
    page = PAGE.read_text(encoding="utf-8")
    assert page == make_page(), "run: python -m agent_envs.catalogue --output ENVIRONMENTS.md"


def check_declarations(env):
    """Compare what a class declares for the page with what an environment has."""
    env.reset(seed=0)
    kind, *_, info = type(env.unwrapped), *env.step("")
    functions = [entry["function"] for entry in info["tools"]]
    if env.spec.id != "AgentR1/BFCL-v0":  # there, each task has functions of its own
        assert kind.tool_signatures == tuple(
            f"{function['name']}({', '.join(function['parameters']['properties'])})"
            for function in functions
        )
    assert kind.optional_tool_names == tuple(env.unwrapped.optional_tools)
    assert set(kind.metric_names) == set(info["metrics"])


@pytest.mark.parametrize("env_id", [spec.id for spec in ENVIRONMENTS])
def test_what_is_declared_is_so(env_id, data_files, request):
    kwargs = {"data": data_files[env_id]} if env_id in data_files else {}
    if env_id in ("AgentR1/ALFWorld-v0", "AgentR1/WebShop-v0"):
        pytest.skip("needs games or a server; see test_text_world and test_web_shop")
    if env_id == "AgentR1/TextWorld-v0":
        kwargs = {"game": request.getfixturevalue("text_world_game")}
    try:
        env = gym.make(env_id, **kwargs)
    except (MissingExtraError, SandboxUnavailableError) as error:
        pytest.skip(str(error))
    check_declarations(env)


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("agent_envs.catalogue.ENVIRONMENTS", ENVIRONMENTS[:1])
    main(["--output", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"# The environments\n\n{INTRODUCTION}\n\n## `AgentR1/HotpotQA-v0`\n\n")
    main([])
    assert page in capsys.readouterr().out
