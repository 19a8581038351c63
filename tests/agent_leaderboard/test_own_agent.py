"""An agent that is in none of our tables: by object from Python, by import path in a file."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import AGENTS
from agent_leaderboard.play.config import AgentConfig, load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.report.summary import read_run, summarise
from agent_leaderboard.report.tables import make_markdown
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.outside.titles import FirstTitle
from tests.agent_leaderboard.small_config import files_of, write_config

CONFIG = """
environments: [{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: 3, contamination: none}]
agents: [{name: mine, kind: "%s", settings: {prefix: "the "}, prices: {prompt: 1, completion: 1}}]
"""
KIND = "tests.agent_leaderboard.outside.titles:FirstTitle"


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return run(load_configs([write_config(folder, CONFIG % KIND)]), folder / "run")


def test_it_plays_and_others_can_replay_it_but_not_ask_it_again(own_run):
    (agent,) = own_run.read_manifest().agents
    assert (agent.kind, agent.settings) == (KIND, {"prefix": "the "})
    assert KIND not in AGENTS
    lines = own_run.read_results("hops", "mine")
    assert all(line.actions[-1].startswith("<answer> the ") for line in lines)
    verification = verify(own_run.path)
    assert verification.problems == []
    assert verification.num_replayed == 3
    assert "mine: its code is its author's own" in verification.summary()
    assert "mine (own code)" in make_markdown(summarise(read_run(own_run.path)))


def test_given_as_an_object_it_is_the_same_run(own_run, tmp_path):
    config = load_configs([write_config(tmp_path, CONFIG % KIND)])
    mine = replace(config.agents[0], kind=FirstTitle)
    by_object = run(replace(config, agents=(mine,)), tmp_path / "run", jobs=2)
    assert files_of(by_object.path) == files_of(own_run.path)


def test_the_command_finds_it_where_it_is_started(own_run, tmp_path):
    shutil.copyfile(Path(__file__).parent / "outside" / "titles.py", tmp_path / "titles.py")
    config = write_config(tmp_path, CONFIG % "titles:FirstTitle")
    program = "from agent_leaderboard.cli import main; main()"  # as the console script does
    script = tmp_path / "bin" / "bench.py"
    script.parent.mkdir()
    script.write_text(f"if __name__ == '__main__':\n    {program}\n")
    command = [sys.executable, str(script), "--config", str(config), "--output", "run"]
    subprocess.run([*command, "--jobs", "2"], cwd=tmp_path, check=True, capture_output=True)
    results = (tmp_path / "run" / "results" / "hops" / "mine.jsonl").read_bytes()
    assert results == own_run.results_path("hops", "mine").read_bytes()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nowhere.agent:MyAgent", "ModuleNotFoundError: No module named 'nowhere'"),
        (KIND.replace("FirstTitle", "LastTitle"), "has no attribute 'LastTitle'"),
        (KIND.replace("FirstTitle", "Rollout"), "unexpected keyword argument 'prefix'"),
    ],
)
def test_one_that_cannot_be_made_is_named_before_anything_is_played(tmp_path, kind, message):
    config = load_configs([write_config(tmp_path, CONFIG % kind)])
    with pytest.raises(ConfigurationError, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_one_made_inside_a_function_is_refused_with_the_way_out(tmp_path):
    class Local(FirstTitle):
        pass

    agent = AgentConfig(name="mine", kind=Local)
    with pytest.raises(ConfigurationError, match="at the top of a module"):
        assert agent.kind_name


def test_what_a_manifest_names_is_never_imported_to_verify_it(own_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(own_run.path, folder)
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace(KIND, "no_such_module:Agent"))
    problems = verify(folder).problems
    assert problems == ["manifest.json: its checksum is not that in checksums.json"]
