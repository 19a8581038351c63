from pathlib import Path

import pytest

from agent_envs import ENVIRONMENTS
from agent_envs.catalogue import INTRODUCTION, NOT_DESCRIBED, main, make_section

PAGE = (Path(__file__).parents[2] / "ENVIRONMENTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("spec", ENVIRONMENTS, ids=lambda spec: spec.id)
def test_the_page_is_what_the_environments_say(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    section = make_section(spec)
    if NOT_DESCRIBED in section:
        pytest.skip(section.partition(NOT_DESCRIBED)[2])
    assert section in PAGE, "run: python -m agent_envs.catalogue --output ENVIRONMENTS.md"


def test_the_command_writes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("agent_envs.catalogue.ENVIRONMENTS", ENVIRONMENTS[:1])
    main(["--output", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"# The environments\n\n{INTRODUCTION}\n\n## `AgentR1/HotpotQA-v0`\n\n")
    main([])
    assert page in capsys.readouterr().out
