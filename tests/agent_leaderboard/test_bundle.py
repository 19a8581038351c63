"""Sharing runs: bundles, merging, and what is refused."""

import dataclasses
import shutil
import zipfile

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import LeftOut
from agent_leaderboard.records.results import FILES, read_run, write_run
from agent_leaderboard.report.board import summarise
from agent_leaderboard.verify import contained
from agent_leaderboard.verify.bundle import export_bundle, merge_bundles, merge_runs
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


def merge(output, bundles, data=None):
    """Merge without the child process, which `test_contained` covers."""
    return merge_bundles(output, bundles, data, contained.check)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, small_run):
    path = tmp_path_factory.mktemp("bundle") / "run.zip"
    export_bundle(small_run, path)
    return path


def bundle_of(folder, data, text):
    made = run(load_configs([write_config(folder, text)]), folder / "run", data=data)
    export_bundle(made, folder / "other.zip")
    return folder / "other.zip"


def test_a_run_comes_out_of_its_bundle_unchanged(bundle, small_run, small_data, tmp_path):
    merged = merge(tmp_path / "merged", [bundle], small_data)
    assert content_of(merged) == content_of(small_run)
    export_bundle(merged, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        assert archive.namelist() == list(FILES)
    with pytest.raises(ConfigurationError, match="exists; choose a new folder"):
        merge(tmp_path, [bundle], small_data)


def test_bundles_and_folders_become_one_run_that_verifies(bundle, copy, small_data, tmp_path):
    """Speed, retries and notes on contamination may differ; a baseline in several counts once."""
    text = MINE.replace("concurrency: 3", "concurrency: 5, max_retries: 0")
    text = text.replace("contamination: none}", "contamination: none at all}", 1)
    text = "".join(line for line in text.splitlines(keepends=True) if "HotpotQA" not in line)
    other = bundle_of(tmp_path, small_data, text)
    known = read_run(copy)
    left_out = [LeftOut(id=id, reason="none") for id in (known.manifest.environments[0].id, "else")]
    manifest = dataclasses.replace(known.manifest, left_out=left_out)
    write_run(copy, dataclasses.replace(known, manifest=manifest))
    merged = merge(tmp_path / "merged", [bundle, copy, other], small_data)
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
    with pytest.raises(DataError, match=f"two.zip: does not fit one.zip: .*{message}"):
        merge_runs({"one.zip": run, "two.zip": changed(run, **changes)})
    own = changed(run)
    other = [dataclasses.replace(one, calls=7) for one in own.results["table", "random"]]
    acting = dataclasses.replace(own, results={("table", "random"): other})
    with pytest.raises(DataError, match="agent 'random': acts otherwise on table"):
        merge_runs({"one.zip": run, "two.zip": acting})


def test_a_forged_bundle_and_one_that_cannot_be_replayed_are_refused(
    bundle, copy, small_data, tmp_path
):
    rows, own = read_rows(copy, "table", "random")
    own[0]["success"] = True
    write_rows(copy, rows)
    export_bundle(copy, tmp_path / "forged.zip")
    with pytest.raises(DataError, match=r"(?s)forged\.zip: cannot be verified.*is true, not false"):
        merge(tmp_path / "merged", [tmp_path / "forged.zip"], small_data)
    with pytest.raises(DataError, match="NOT replayed: hotpotqa: its data are missing"):
        merge(tmp_path / "merged", [bundle])
    assert not (tmp_path / "merged").exists()


def test_only_a_complete_and_unchanged_run_is_exported(copy, tmp_path):
    replace_text(copy / "tasks.json", "hotpotqa", "hotpotqb", hide=False)
    with pytest.raises(DataError, match=r"a file does not match checksums\.json"):
        export_bundle(copy, tmp_path / "a.zip")
    (copy / "checksums.json").unlink()
    with pytest.raises(DataError, match="the run is not complete"):
        export_bundle(copy, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
    outside = shutil.move(copy / "results.parquet", tmp_path / "outside")
    (copy / "results.parquet").symlink_to(outside)
    with pytest.raises(DataError, match=r"results\.parquet: is not a regular file"):
        export_bundle(copy, tmp_path / "a.zip")
