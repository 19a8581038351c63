"""A run: what it writes, how it resumes, and when it repeats an episode."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import PlayedEpisode, Usage, build_agent
from agent_leaderboard.play import episodes
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.results import FILES, read_checksums, read_run
from agent_leaderboard.verify.verify import check_run
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.runs import CONFIG, content_of, edit_manifest, write_config

ROOT = Path(__file__).parents[2]
NO_DATA = """
protocol: {concurrency: 4}
environments:
  - {id: AgentR1/SyntheticMultiHop-v0, name: multi-hop, kwargs: {split: test}, tasks: 40,
     contamination: none}
  - {id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: test}, tasks: 30,
     contamination: none}
agents:
  - {name: random, kind: random}
  - {name: oracle, kind: oracle}
"""


def small(tmp_path, text=CONFIG):
    return load_configs([write_config(tmp_path, text)])


def test_a_run_has_every_task_and_sample_of_every_agent_in_order(small_run, small_data):
    found = read_run(small_run)
    assert [(e.slug, e.num_tasks) for e in found.manifest.environments] == [
        ("table", 3), ("multi-hop", 2), ("hotpotqa", 2),
    ]  # fmt: skip
    for environment, agent in found.manifest.cells:
        results = found.results[environment.slug, agent.slug]
        tasks = [entry.task for entry in found.tasks[environment.slug]]
        assert [(one.task, one.sample) for one in results] == [
            (task, sample) for task in tasks for sample in (0, 1)
        ]
        assert all(one.seconds is not None for one in results)
        assert agent.slug != "oracle" or all(one.success for one in results)
    assert {path.name for path in small_run.iterdir()} == set(FILES)
    assert read_checksums(small_run).keys() == set(FILES) - {"checksums.json"}
    record = found.manifest.environment("hotpotqa")
    assert [file.name for file in record.data] == ["hotpot.jsonl"]
    assert record.kwargs == {"data": "${data}/hotpot.jsonl"}
    assert (record.outcome_terms, record.max_turns) == (["exact_match"], 5)
    assert (record.is_text_public, found.manifest.environment("table").is_text_public) == (0, 1)
    assert str(small_data) not in (small_run / "manifest.json").read_text()


def test_a_journal_that_was_cut_anywhere_is_completed_to_the_same_results(
    tmp_path, small_run, small_data, monkeypatch
):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("agent_leaderboard.play.run.write_run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(small(tmp_path), folder, data=small_data)
    journal = folder / "work" / "episodes.jsonl"
    assert not (folder / "results.parquet").exists()
    whole = journal.read_bytes()
    for keep in (0, 2_000, 9_000):
        shutil.rmtree(folder)
        journal.parent.mkdir(parents=True)
        journal.write_bytes(whole[:keep])
        run(small(tmp_path), folder, data=small_data)
        assert content_of(folder) == content_of(small_run)
        assert not journal.parent.exists()


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_run_that_was_stopped_before_its_checksums_gets_them(tmp_path, copy, small_data):
    checksums = (copy / "checksums.json").read_bytes()
    (copy / "checksums.json").unlink()
    run(small(tmp_path), copy, data=small_data)
    assert (copy / "checksums.json").read_bytes() == checksums


def test_a_complete_run_is_left_alone(tmp_path, copy, small_data):
    times = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    run(small(tmp_path), copy, data=small_data)
    assert times == {path: path.stat().st_mtime_ns for path in copy.iterdir()}


def test_a_folder_with_another_run_is_refused(tmp_path, small_run, small_data):
    other = small(tmp_path, CONFIG.replace("seed: 5", "seed: 6"))
    with pytest.raises(ConfigurationError, match="contains another run"):
        run(other, small_run, data=small_data)


def test_a_killed_run_resumes_to_the_same_results(tmp_path):
    """A real process with two workers, killed with them and without warning."""
    config = write_config(tmp_path, NO_DATA)
    whole = run(load_configs([config]), tmp_path / "whole")
    folder = tmp_path / "killed"
    journal = folder / "work" / "episodes.jsonl"
    process = _start(config, folder)
    while _num_lines(journal) < 3 and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "checksums.json").exists()
    assert 3 <= _num_lines(journal) < 36
    run(load_configs([config]), folder)
    assert content_of(folder) == content_of(whole)


def _start(config, folder):
    command = [sys.executable, "-m", "agent_leaderboard", "--config", str(config)]
    return subprocess.Popen(
        [*command, "--output", str(folder), "--jobs", "2"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Flaky:
    """The oracle, whose first tries fail because a server is down."""

    def __init__(self, num_faults):
        self.agent = build_agent("oracle", {})
        self.num_faults = num_faults
        self.calls = []

    def play(self, make_env, specs):
        self.calls.append([spec.task for spec in specs])
        played = self.agent.play(make_env, specs)
        usage = Usage(calls=1, prompt_tokens=10, completion_tokens=2)
        is_down = len(self.calls) <= self.num_faults
        return [
            PlayedEpisode(
                trajectory=dataclasses.replace(
                    episode.trajectory,
                    stop_reason=StopReason.ENVIRONMENT_ERROR,
                    error="Traceback\n  File '/home/me/x.py'\nOSError: the server is away",
                )
                if is_down and spec.task == 1
                else episode.trajectory,
                usage=usage,
            )
            for spec, episode in zip(specs, played, strict=True)
        ]


@pytest.mark.parametrize(("num_faults", "is_scored"), [(1, True), (2, True), (3, False)])
def test_only_infrastructure_failures_are_retried_up_to_the_limit(
    tmp_path, monkeypatch, num_faults, is_scored
):
    agent = Flaky(num_faults)
    monkeypatch.setattr(episodes, "_agent", lambda kind, settings: agent)
    text = NO_DATA.replace("tasks: 40", "tasks: 3").replace(
        "  - {name: random, kind: random}\n", ""
    )
    config = small(tmp_path, text).choose(environments=["multi-hop"])
    folder = run(config, tmp_path / "run")
    assert agent.calls == [[0, 1, 2], [1], [1]][: num_faults + 1]
    lines = read_run(folder).results["multi-hop", "oracle"]
    assert [line.is_scored for line in lines] == [True, is_scored, True]
    assert [line.calls for line in lines] == [1, min(num_faults + 1, 3), 1]
    assert lines[1].error == (None if is_scored else "OSError: the server is away")


def test_a_resumed_run_retries_again_and_keeps_the_costs_of_earlier_tries(tmp_path, monkeypatch):
    agent = Flaky(num_faults=4)
    monkeypatch.setattr(episodes, "_agent", lambda kind, settings: agent)
    config = small(tmp_path, NO_DATA.replace("tasks: 40", "tasks: 3"))
    config = config.choose(environments=["multi-hop"], agents=["oracle"])
    for _ in range(2):
        folder = run(config, tmp_path / "run")
    assert agent.calls == [[0, 1, 2], [1], [1], [1], [1]]
    lines = read_run(folder).results["multi-hop", "oracle"]
    assert all(line.is_scored for line in lines)
    assert [line.calls for line in lines] == [1, 5, 1]
    assert [line.prompt_tokens for line in lines] == [10, 50, 10]


def test_environments_without_hidden_tasks_or_a_sandbox_are_left_out(tmp_path, small_data):
    text = CONFIG.replace(
        "agents:\n",
        "  - {id: AgentR1/CommandLine-v0, kwargs: {sandbox: 'container:no/such:image'},\n"
        "     optional: true, contamination: none}\nagents:\n",
    )
    config = small(tmp_path, text).choose(agents=["oracle"]).hide(tmp_path / "seed")
    folder = run(config, tmp_path / "run", data=small_data)
    manifest = read_run(folder).manifest
    assert [one.slug for one in manifest.environments] == ["table", "multi-hop"]
    reasons = {one.id: one.reason for one in manifest.left_out}
    assert "the published run draws all of them" in reasons["AgentR1/HotpotQA-v0"]
    assert "no/such:image" in reasons["AgentR1/CommandLine-v0"]
    assert check_run(folder).problems == []
    only = config.choose(environments=["hotpotqa"])
    with pytest.raises(ConfigurationError, match="No environment of the run is available"):
        run(only, tmp_path / "none", data=small_data)


def test_an_agent_has_no_episodes_where_it_does_not_play(tmp_path, small_data):
    text = CONFIG.replace("kind: random}", "kind: random, not_played: [multi-hop, hotpotqa]}")
    config = small(tmp_path, text).choose(agents=["random", "oracle"], tasks=1)
    part = run(config.choose(environments=["table", "multi-hop"]), tmp_path / "run")
    assert read_run(part).results.keys() == {
        ("table", "random"), ("table", "oracle"), ("multi-hop", "oracle"),
    }  # fmt: skip
    checked = check_run(part)
    assert checked.problems == []
    assert "random: that it did not run on multi-hop" in checked.on_trust
    other = run(config.choose(environments=["multi-hop"]), tmp_path / "other")
    assert [agent.slug for agent in read_run(other).manifest.agents] == ["oracle"]
    only = config.choose(environments=["multi-hop"], agents=["random"])
    with pytest.raises(ConfigurationError, match="No agent of the run plays"):
        run(only, tmp_path / "none")


def test_a_resumed_run_keeps_the_date_and_the_commit_at_which_it_began(tmp_path):
    text = NO_DATA.replace("tasks: 40", "tasks: 1").replace("tasks: 30", "tasks: 1")
    folder = run(small(tmp_path, text), tmp_path / "run")
    (agent, _) = read_run(folder).manifest.agents
    assert agent.date >= "2026-01-01"
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert agent.commit == (head or None)
    origin = {"date": "2025-12-31", "commit": "a" * 40}
    edit_manifest(folder, lambda manifest: manifest["agents"][0].update(origin))
    (folder / "checksums.json").unlink()
    run(small(tmp_path, text), folder)
    (agent, _) = read_run(folder).manifest.agents
    assert (agent.date, agent.commit) == ("2025-12-31", "a" * 40)
