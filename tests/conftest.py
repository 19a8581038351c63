import gc
import json
import os
from pathlib import Path

# Before any library reads them; the programs that tests start get them, too.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gymnasium as gym
import pytest

import agent_envs  # noqa: F401 - registers the environments
from tests.example_rows import EXAMPLE_ROWS, HOTPOT_ROWS

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Run one process more than there are processors: some tests wait."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish():
    """Exempt imported libraries from garbage collection, which each training forces."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def text_world_game(tmp_path_factory):
    """A small game of TextWorld."""
    pytest.importorskip("textworld", reason="the extra textworld is not installed")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("games")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        gym.make("AgentR1/TextWorld-v0", rooms=2, objects=3, quest_length=2).reset(seed=1)
    (path,) = folder.rglob("*.z8")
    return str(path)


@pytest.fixture(scope="session")
def strong_sandbox():
    """Skip where this machine has no strong isolation."""
    from agent_envs.errors import SandboxUnavailableError
    from agent_envs.tools.code import shared_sandbox

    try:
        return shared_sandbox("strong")
    except SandboxUnavailableError as error:
        pytest.skip(f"no strong isolation here: {error}")


@pytest.fixture(scope="session")
def data_files(tmp_path_factory):
    """A file of made-up rows for each environment that reads data."""
    folder = tmp_path_factory.mktemp("rows")
    for name, own in EXAMPLE_ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in own)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {f"AgentR1/{name}-v0": str(folder / f"{name}.jsonl") for name in EXAMPLE_ROWS}


@pytest.fixture(scope="session")
def shared_data():
    """Real rows of the data sets, which lie beside the repository where there are any."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data are not at hand: {folder} is missing")
    return folder


@pytest.fixture(scope="session")
def hotpot_file(tmp_path_factory):
    """A file of two made-up questions in the hub's form."""
    path = tmp_path_factory.mktemp("data") / "hotpot.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HOTPOT_ROWS), encoding="utf-8")
    return str(path)
