import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError
from agent_envs.new import main, write_template

PAGE = Path(__file__).parents[2] / "docs" / "environments" / "own.md"


def run(folder, *command):
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_what_is_written_passes_the_kit_and_its_own_tests(tmp_path):
    shown = run(tmp_path, "agent_envs.new", "toy_shop")
    assert "python -m agent_envs.check toy_shop:ToyShop-v0" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_toy_shop.py", "toy_shop.py"]
    lines = run(tmp_path, "agent_envs.check", "toy_shop:ToyShop-v0").splitlines()
    assert {line[:5] for line in lines} == {"ok   "}
    assert "2 passed" in run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider")


def test_the_page_shows_what_is_written(tmp_path):
    module, test = write_template("my_env", tmp_path / "new" / "folder")
    page = PAGE.read_text(encoding="utf-8")
    assert f"```python\n{module.read_text(encoding='utf-8')}```" in page
    assert test.name == "test_my_env.py"


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "test_my_env.py").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"test_my_env\.py exists; nothing was written"):
        write_template("my_env", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_my_env.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-env", "cannot name a module"),
        ("MyEnv", "cannot name a module"),
        ("class", "cannot name a module"),
        ("json", "There is a module json already"),
    ],
)
def test_a_bad_name_is_one_line(name, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^new: .*{message}"):
        main([name, "--folder", str(tmp_path)])
    assert not list(tmp_path.iterdir())
