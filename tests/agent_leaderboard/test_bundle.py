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
from agent_leaderboard.verify import contained, merge
from agent_leaderboard.verify.bundle import export_bundle
from agent_leaderboard.verify.merge import merge_bundles
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.runs import (
    CONFIG,
    content_of,
    read_rows,
    replace_text,
    write_config,
    write_rows,
)

ONLY_ORACLE = CONFIG.replace("  - {name: random, kind: random}\n", "").replace(
    "  - {name: rules, kind: heuristic}\n", ""
)
MINE = ONLY_ORACLE.replace("name: oracle", "name: mine").replace("kind: oracle", "kind: random")


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Verify without the child process, which `test_contained` covers."""
    monkeypatch.setattr(merge, "verify", contained.check)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, small_run):
    path = tmp_path_factory.mktemp("bundle") / "run.zip"
    export_bundle(small_run, path)
    return path


def bundle_of(folder, data, text):
    made = run(load_configs([write_config(folder, text)]), folder / "run", data=data)
    export_bundle(made, folder / "other.zip")
    return folder / "other.zip"


def agents_of(folder):
    return [agent.slug for agent in read_run(folder).manifest.agents]


def test_a_run_comes_out_of_its_bundle_unchanged(bundle, small_run, small_data, tmp_path):
    merged = merge_bundles(tmp_path / "merged", [bundle], small_data)
    assert content_of(merged) == content_of(small_run)
    export_bundle(merged, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        assert archive.namelist() == list(FILES)


def test_bundles_and_folders_become_one_run_that_verifies(bundle, copy, small_data, tmp_path):
    """Speed, retries and notes on contamination may differ; a baseline in several counts once."""
    text = MINE.replace("concurrency: 3", "concurrency: 5, max_retries: 0")
    text = text.replace("contamination: none}", "contamination: none at all}", 1)
    other = bundle_of(tmp_path, small_data, text)
    known = read_run(copy)
    left_out = [LeftOut(id=id, reason="none") for id in (known.manifest.environments[0].id, "else")]
    manifest = dataclasses.replace(known.manifest, left_out=left_out)
    write_run(copy, dataclasses.replace(known, manifest=manifest))
    merged = merge_bundles(tmp_path / "merged", [bundle, copy, other], small_data)
    assert agents_of(merged) == ["random", "rules", "oracle", "mine"]
    assert [one.id for one in read_run(merged).manifest.left_out] == ["else"]
    assert verify(merged, small_data).problems == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: oracle, kind: oracle", "name: oracle, kind: random", "names another kind of agent"),
        ("seed: 5", "seed: 6", "protocol: seed is 6, not 5"),
        ("samples_per_task: 2", "samples_per_task: 1", "protocol: samples_per_task is 1, not 2"),
        ("tasks: 2,", "tasks: 1,", "environment 'multi-hop': its num_tasks is 1, not 2"),
    ],
)
def test_a_bundle_with_another_measure_is_refused(bundle, small_data, tmp_path, old, new, message):
    other = bundle_of(tmp_path, small_data, ONLY_ORACLE.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    assert "other.zip: " in str(caught.value)
    assert not (tmp_path / "merged").exists()


def test_different_agents_of_one_name_are_refused(bundle, small_data, tmp_path):
    bundles = []
    for number, kind in enumerate(("oracle", "random")):
        (tmp_path / kind).mkdir()
        text = MINE.replace("kind: random", f"kind: {kind}")
        bundles.append(bundle_of(tmp_path / kind, small_data, text))
        assert number == len(bundles) - 1
    with pytest.raises(DataError, match="its agent 'mine' differs"):
        merge_bundles(tmp_path / "merged", bundles, small_data)


def test_an_agent_that_lacks_an_environment_leaves_a_hole(bundle, small_data, tmp_path):
    text = "".join(line for line in MINE.splitlines(keepends=True) if "HotpotQA" not in line)
    merged = merge_bundles(
        tmp_path / "merged", [bundle, bundle_of(tmp_path, small_data, text)], small_data
    )
    finished = read_run(merged)
    assert finished.manifest.agent("mine").not_played == ["hotpotqa"]
    assert verify(merged, small_data).problems == []
    board = summarise(finished)
    assert ("hotpotqa", "mine") not in board.cells
    assert board.overall["mine"] is None


def test_a_forged_bundle_is_refused_with_the_reason(copy, small_data, tmp_path):
    rows, own = read_rows(copy, "table", "random")
    own[0]["success"] = True
    write_rows(copy, rows)
    export_bundle(copy, tmp_path / "forged.zip")
    with pytest.raises(DataError, match=r"(?s)forged\.zip: does not verify.*is true, replay gives"):
        merge_bundles(tmp_path / "merged", [tmp_path / "forged.zip"], small_data)


def test_a_bundle_that_cannot_be_replayed_here_is_refused(bundle, tmp_path):
    with pytest.raises(DataError, match="cannot be verified here: hotpotqa: its data are missing"):
        merge_bundles(tmp_path / "merged", [bundle])


def test_only_a_complete_and_unchanged_run_is_exported(copy, tmp_path):
    replace_text(copy / "tasks.json", "hotpotqa", "hotpotqb", hide=False)
    with pytest.raises(DataError, match=r"tasks\.json: does not match checksums\.json"):
        export_bundle(copy, tmp_path / "a.zip")
    (copy / "checksums.json").unlink()
    with pytest.raises(DataError, match="the run is not complete"):
        export_bundle(copy, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
    outside = shutil.move(copy / "results.parquet", tmp_path / "outside")
    (copy / "results.parquet").symlink_to(outside)
    with pytest.raises(DataError, match=r"results\.parquet: is not a regular file"):
        export_bundle(copy, tmp_path / "a.zip")


def test_a_merged_run_does_not_overwrite(bundle, small_data, tmp_path):
    with pytest.raises(ConfigurationError, match="exists; choose a new folder"):
        merge_bundles(tmp_path, [bundle], small_data)
