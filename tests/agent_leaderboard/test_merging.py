"""Merging runs, and what is refused."""

import dataclasses
import shutil

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.entries import entry
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import LeftOut
from agent_leaderboard.records.results import read_run, write_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.runs import (
    CONFIG,
    content_of,
    read_rows,
    replace_text,
    write_config,
    write_rows,
)

MINE = CONFIG.partition("agents:")[0] + "agents: [{name: mine, kind: random}]\n"


def merge(output, folders, data=None):
    """Merge without the child process, which `test_contained` covers."""
    return entry.merge(output, folders, data, verify)


def test_a_single_run_stays_unchanged(small_run, small_data, tmp_path):
    merged = merge(tmp_path / "merged", [small_run], small_data)
    assert content_of(merged) == content_of(small_run)
    with pytest.raises(ConfigurationError, match="exists; choose a new folder"):
        merge(tmp_path, [small_run], small_data)


def test_several_runs_become_one_that_verifies(small_run, copy, small_data, tmp_path):
    """Speed and notes on contamination may differ; a baseline in several counts once."""
    text = MINE.replace("concurrency: 3", "concurrency: 5")
    text = text.replace("contamination: none}", "contamination: none at all}", 1)
    text = "".join(line for line in text.splitlines(keepends=True) if "HotpotQA" not in line)
    other = run(load_configs([write_config(tmp_path, text)]), tmp_path / "other", data=small_data)
    known = read_run(copy)
    left_out = [LeftOut(id=id, reason="none") for id in (known.manifest.environments[0].id, "else")]
    manifest = dataclasses.replace(known.manifest, left_out=left_out)
    write_run(copy, dataclasses.replace(known, manifest=manifest))
    merged = merge(tmp_path / "merged", [small_run, copy, other], small_data)
    finished = read_run(merged)
    names = [agent.slug for agent in finished.manifest.agents]
    assert names == ["random", "rules", "oracle", "mine"]
    assert [one.id for one in finished.manifest.left_out] == ["else"]
    assert verify(merged, small_data).problems == []
    # an agent that lacks an environment leaves a hole
    assert finished.manifest.agent("mine").not_played == ["hotpotqa"]
    board = summarise(finished)
    assert ("hotpotqa", "mine") not in board.cells
    assert board.overall["mine"] is None


def changed(run, **changes):
    """A run whose first record of each kind has other fields."""
    manifest = run.manifest
    new = {
        "protocol": dataclasses.replace(manifest.protocol, **changes.get("protocol", {})),
        "environments": [dataclasses.replace(manifest.environments[0],
                                             **changes.get("environment", {}))],
        "agents": [dataclasses.replace(manifest.agents[0], **changes.get("agent", {}))],
    }  # fmt: skip
    results = {cell: own for cell, own in run.results.items() if cell == ("table", "random")}
    return dataclasses.replace(run, manifest=dataclasses.replace(manifest, **new), results=results)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": {"seed": 6}}, "protocol, field 'seed': is 6, not 5"),
        ({"protocol": {"samples_per_task": 1}}, "field 'samples_per_task': is 1, not 2"),
        ({"environment": {"num_tasks": 1}}, "environment 'table', field 'num_tasks': is 1, not 3"),
        ({"agent": {"kind": "oracle"}}, "agent 'random', field 'kind'"),
    ],
)
def test_a_run_with_another_measure_or_another_agent_of_a_name_is_refused(
    small_run, changes, message
):
    run = read_run(small_run)
    with pytest.raises(DataError, match=f"two: does not fit one: .*{message}"):
        entry.merge_runs({"one": run, "two": changed(run, **changes)})
    own = changed(run)
    other = [dataclasses.replace(one, calls=7) for one in own.results["table", "random"]]
    acting = dataclasses.replace(own, results={("table", "random"): other})
    with pytest.raises(DataError, match="agent 'random': acts otherwise on table"):
        entry.merge_runs({"one": run, "two": acting})


def test_a_forged_run_and_one_that_cannot_be_replayed_are_refused(
    small_run, copy, small_data, tmp_path
):
    rows, own = read_rows(copy, "table", "random")
    own[0]["success"] = True
    write_rows(copy, rows)
    with pytest.raises(DataError, match=r"(?s)copy: cannot be verified.*is true, not false"):
        merge(tmp_path / "merged", [copy], small_data)
    with pytest.raises(DataError, match="NOT replayed: hotpotqa: its data are missing"):
        merge(tmp_path / "merged", [small_run])
    assert not (tmp_path / "merged").exists()


def test_only_a_complete_and_unchanged_run_is_copied(copy, tmp_path):
    replace_text(copy / "tasks.json", "hotpotqa", "hotpotqb", hide=False)
    with pytest.raises(DataError, match="the run has 30"):
        merge(tmp_path / "merged", [copy])
    (copy / "checksums.json").unlink()
    with pytest.raises(DataError, match=r"checksums\.json: cannot be read"):
        entry.copy_run(copy, tmp_path / "a")
    outside = shutil.move(copy / "results.parquet", tmp_path / "outside")
    (copy / "results.parquet").symlink_to(outside)
    with pytest.raises(DataError, match=r"results\.parquet: is not a regular file"):
        entry.copy_run(copy, tmp_path / "a")
    assert not (tmp_path / "a").exists()
