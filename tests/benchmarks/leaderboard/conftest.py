import pytest

from benchmarks.leaderboard.config import load_configs
from benchmarks.leaderboard.run import run
from tests.benchmarks.leaderboard.small_config import data_folder, write_config


@pytest.fixture(scope="session")
def small_data(tmp_path_factory, hotpot_file):
    """A data folder with two made-up rows."""
    return data_folder(tmp_path_factory.mktemp("leaderboard"), hotpot_file)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory, small_data):
    """A complete run; copy it before changing it."""
    folder = tmp_path_factory.mktemp("small")
    config = load_configs([write_config(folder)])
    return run(config, folder / "run", data=small_data).path
