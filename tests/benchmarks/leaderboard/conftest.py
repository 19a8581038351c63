from pathlib import Path

import pytest

from benchmarks.leaderboard.summary import read_run, summarise
from tests.benchmarks.leaderboard.played_runs import make_run


@pytest.fixture(scope="session")
def data_folder(hotpot_file):
    """A folder with the rows of the licensed environment."""
    return Path(hotpot_file).parent


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, data_folder):
    """A run folder; not to be written to."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", data_folder)


@pytest.fixture(scope="session")
def board(run_folder):
    """The same run, summarised."""
    return summarise(read_run(run_folder))
