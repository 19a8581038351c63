"""Custom agents: functions and classes, given by import path or as objects; their failures."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError, RolloutError
from agent_leaderboard.agents.agent import AGENTS
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import read_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.report.tables import make_markdown
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.runs import content_of, read_rows, replace_text, write_config

ACTING = """
protocol: {concurrency: 2, max_retries: 0}
environments: [{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: %d, contamination: none}]
agents: [{name: mine, kind: "tests.agent_leaderboard.outside.acting:%s", settings: %s,
          prices: {prompt: 1, completion: 2}, organisation: us, licence: MIT}]
"""
CONFIG = """
environments: [{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: 3, contamination: none}]
agents: [{name: mine, kind: "%s", settings: {prefix: "the "}, prices: {prompt: 1, completion: 1}}]
"""
KIND = "tests.agent_leaderboard.outside.titles:FirstTitle"


def run_acting(folder, name, settings="{}", tasks=3):
    config = load_configs([write_config(folder, ACTING % (tasks, name, settings))])
    return run(config, folder / "run")


def results_of(folder):
    return read_run(folder).results["hops", "mine"]


def test_a_function_is_called_for_each_turn_and_remembers_its_episode(tmp_path):
    made = run_acting(tmp_path, "first_title")
    for one in results_of(made):
        assert len(one.actions) == 2
        assert one.calls == 0
    assert verify(made).problems == []


def test_a_class_gets_its_settings_and_reports_usage(tmp_path):
    for one in results_of(run_acting(tmp_path, "Counting", "{prefix: n, concurrency: 3}")):
        assert one.actions[-1] == "<answer> n3 </answer>"
        assert (one.calls, one.prompt_tokens) == (3, 30)
        assert one.money == pytest.approx((30 * 1 + 6 * 2) / 1e6)


def test_a_turn_without_text_is_a_failure_with_the_reason(tmp_path):
    (one,) = results_of(run_acting(tmp_path, "silent", tasks=1))
    assert "silent returned NoneType; it must return the text of a turn" in one.error


def test_an_outage_pauses_a_run_and_failed_episodes_run_again(tmp_path, capsys):
    flag = tmp_path / "flag"
    flag.write_text("back")
    settings = f"{{flag: '{flag}'}}"
    whole = content_of(run_acting(tmp_path, "Failing", settings, tasks=9))
    flag.write_text("away")
    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(RolloutError, match=r"(?s)Paused: .*'mine' on 'hops'.*the server is away"):
        run_acting(again, "Failing", settings, tasks=9)
    journal = again / "run" / "work" / "episodes.jsonl"
    assert len(journal.read_text().splitlines()) == 3  # the third chunk of two made it six in a row
    assert "2 of 2 episodes ended by an infrastructure failure" in capsys.readouterr().err
    flag.write_text("back")
    assert content_of(run_acting(again, "Failing", settings, tasks=9)) == whole


# Agents that run whole episodes


@pytest.fixture(scope="module")
def custom_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom")
    return run(load_configs([write_config(folder, CONFIG % KIND)]), folder / "run")


def test_its_actions_are_replayed_and_its_code_stays_on_trust(custom_run, tmp_path):
    found = read_run(custom_run)
    (agent,) = found.manifest.agents
    assert (agent.kind, agent.settings) == (KIND, {"prefix": "the "})
    assert KIND not in AGENTS
    assert all(one.actions[-1].startswith("<answer> the ") for one in results_of(custom_run))
    verification = verify(custom_run)
    assert verification.problems == []
    assert verification.num_replayed == 3
    assert "mine: its code is its author's" in verification.summary()
    assert "mine (own code)" in make_markdown(summarise(found))
    folder = shutil.copytree(custom_run, tmp_path / "run")
    replace_text(folder / "manifest.json", KIND, "no_such_module:Agent")  # is never imported
    assert verify(folder).problems == []


def test_the_command_finds_an_agent_in_the_current_folder(custom_run, tmp_path):
    shutil.copyfile(Path(__file__).parent / "outside" / "titles.py", tmp_path / "titles.py")
    config = write_config(tmp_path, CONFIG % "titles:FirstTitle")
    program = "from agent_leaderboard.cli import main; main()"  # as the console script does
    script = tmp_path / "bin" / "bench.py"
    script.parent.mkdir()
    script.write_text(f"if __name__ == '__main__':\n    {program}\n")
    command = [sys.executable, str(script), "--config", str(config), "--output", "run"]
    subprocess.run([*command, "--jobs", "2"], cwd=tmp_path, check=True, capture_output=True)
    found, expected = (
        [{**row, "seconds": 0} for row in read_rows(folder)[0]]
        for folder in (tmp_path / "run", custom_run)
    )
    assert found == expected


OWN = "tests.agent_leaderboard.outside.%s"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (OWN % "acting:first_title", "{prefix: a}", "is a function, which takes no settings"),
        (OWN % "acting:Usage", "{}", "has no attribute 'act'"),
        (OWN % "acting:Counting", "{concurrency: 0}", "'concurrency' must be a positive integer"),
        ("nowhere.agent:MyAgent", "{}", "ModuleNotFoundError: No module named 'nowhere'"),
        (OWN % "titles:LastTitle", "{}", "has no attribute 'LastTitle'"),
        (OWN % "titles:Rollout", "{prefix: a}", "unexpected keyword argument 'prefix'"),
        ("iterative_rag", "{model: m, base_url: 'http://a/v1', iterations: 7}", "takes 8 turns"),
    ],
)
def test_an_agent_that_cannot_be_made_is_refused_before_any_episode(
    tmp_path, kind, settings, message
):
    text = (CONFIG % kind).replace('{prefix: "the "}', settings)
    with pytest.raises(ConfigurationError, match=message):
        run(load_configs([write_config(tmp_path, text)]), tmp_path / "run")
    assert not (tmp_path / "run" / "manifest.json").exists()
