"""An agent that is a function or a class which is asked for each turn; faults and outages of it."""

import pytest

from agent_envs.errors import ConfigurationError, RolloutError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.small_config import files_of, write_config

CONFIG = """
protocol: {concurrency: 2, max_retries: 0}
environments: [{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: %d, contamination: none}]
agents: [{name: mine, kind: "tests.agent_leaderboard.outside.acting:%s", settings: %s,
          prices: {prompt: 1, completion: 2}, organisation: us, licence: MIT}]
"""


def play(folder, name, settings="{}", tasks=3):
    config = load_configs([write_config(folder, CONFIG % (tasks, name, settings))])
    return run(config, folder / "run")


def test_a_function_is_asked_for_each_turn_and_remembers_its_episode(tmp_path):
    made = play(tmp_path, "first_title")
    for line in made.read_results("hops", "mine"):
        assert len(line.actions) == 2
        assert line.usage.calls == 0
    assert verify(made.path).problems == []


def test_a_class_gets_its_settings_and_says_what_turns_took(tmp_path):
    made = play(tmp_path, "Counting", "{prefix: n, concurrency: 3}")
    for line in made.read_results("hops", "mine"):
        assert line.actions[-1] == "<answer> n3 </answer>"
        assert (line.usage.calls, line.usage.prompt_tokens) == (3, 30)
        assert line.usage.money == pytest.approx((30 * 1 + 6 * 2) / 1e6)
    (agent,) = made.read_manifest().agents
    assert (agent.organisation, agent.licence, agent.url) == ("us", "MIT", None)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("first_title", "{prefix: a}", r"a function takes no settings \(prefix\)"),
        ("Usage", "{}", r"neither a method 'act\(state\)' nor 'play'"),
        ("Counting", "{concurrency: 0}", "must be a whole number from 1, not 0"),
    ],
)
def test_what_is_no_agent_is_refused_before_anything_is_played(tmp_path, name, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        play(tmp_path, name, settings)
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_turn_that_is_no_text_is_a_fault_that_says_so(tmp_path):
    (line,) = play(tmp_path, "silent", tasks=1).read_results("hops", "mine")
    assert "silent returned NoneType; it must return the text of a turn" in line.error


def test_an_outage_pauses_a_run_and_its_faults_are_played_again(tmp_path, capsys):
    flag = tmp_path / "flag"
    flag.write_text("back")
    settings = f"{{flag: '{flag}'}}"
    whole = files_of(play(tmp_path, "Failing", settings, tasks=9).path)
    flag.write_text("away")
    (tmp_path / "again").mkdir()
    with pytest.raises(RolloutError, match=r"(?s)Paused: .*'mine' on 'hops'.*the server is away"):
        play(tmp_path / "again", "Failing", settings, tasks=9)
    results = tmp_path / "again" / "run" / "results" / "hops" / "mine.jsonl"
    assert len(results.read_text().splitlines()) == 6  # the third chunk of two made it six in a row
    assert "2 of 2 episodes ended by a fault" in capsys.readouterr().err
    flag.write_text("back")
    assert files_of(play(tmp_path / "again", "Failing", settings, tasks=9).path) == whole


def test_faults_of_a_run_that_was_finished_are_played_again_too(tmp_path):
    flag = tmp_path / "flag"
    flag.write_text("away")
    settings = f"{{flag: '{flag}'}}"
    made = play(tmp_path, "Failing", settings)  # three faults are no outage: it comes to its end
    assert made.checksums_path.exists()
    assert not any(line.is_scored for line in made.read_results("hops", "mine"))
    flag.write_text("back")
    made = play(tmp_path, "Failing", settings)
    assert all(line.is_scored for line in made.read_results("hops", "mine"))
    assert verify(made.path).problems == []
