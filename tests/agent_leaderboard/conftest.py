import shutil
from pathlib import Path

import pytest

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import summarise
from tests.agent_leaderboard.runs import make_data_folder, make_run, write_config


@pytest.fixture(scope="session")
def small_data(tmp_path_factory, hotpot_file):
    """A data folder with two made-up rows."""
    return make_data_folder(tmp_path_factory.mktemp("leaderboard"), hotpot_file)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, small_data):
    """A complete run; copy it before changing it."""
    folder = tmp_path_factory.mktemp("small")
    return run(load_configs([write_config(folder)]), folder / "run", data=small_data)


@pytest.fixture
def copy(tmp_path, small_run):
    """A copy of the run, to be changed."""
    return shutil.copytree(small_run, tmp_path / "copy")


@pytest.fixture(scope="session")
def data_folder(hotpot_file):
    """A folder with the rows of the licensed environment."""
    return Path(hotpot_file).parent


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, data_folder):
    """A run of made-up agents; not to be written to."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", data_folder)


@pytest.fixture(scope="session")
def board(run_folder):
    """The statistics of that run."""
    return summarise(read_run(run_folder))
