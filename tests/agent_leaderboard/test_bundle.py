"""Sharing runs: bundles, and what is refused."""

import dataclasses
import json
import shutil
import zipfile

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.manifest import LeftOut
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.summary import read_run, summarise
from agent_leaderboard.verify import contained, merge
from agent_leaderboard.verify.bundle import export_bundle
from agent_leaderboard.verify.merge import merge_bundles
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.small_config import CONFIG, files_of, write_config

ONLY_ORACLE = CONFIG.replace("  - {name: random, kind: random}\n", "").replace(
    "  - {name: rules, kind: heuristic}\n", ""
)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch):
    """Verify without the process of its own, which `test_contained` tries: it takes seconds."""
    monkeypatch.setattr(merge, "verify", contained.check)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, small_run):
    path = tmp_path_factory.mktemp("bundle") / "run.zip"
    export_bundle(small_run, path)
    return path


def bundle_of(folder, data, text):
    made = run(load_configs([write_config(folder, text)]), folder / "run", data=data)
    export_bundle(made.path, folder / "other.zip")
    return folder / "other.zip"


def rewritten(bundle, path, change):
    """Copy a bundle, with the content of each file as `change` returns it."""
    with zipfile.ZipFile(bundle) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return path


def test_a_run_comes_out_of_its_bundle_as_it_went_in(bundle, small_run, small_data, tmp_path):
    merged = merge_bundles(tmp_path / "merged", [bundle], small_data)
    assert files_of(merged.path) == files_of(small_run)
    export_bundle(merged.path, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == bundle.read_bytes()


def test_bundles_of_several_people_become_one_run_that_verifies(bundle, small_data, tmp_path):
    other = bundle_of(tmp_path, small_data, ONLY_ORACLE.replace("name: oracle", "name: mine"))
    merged = merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    agents = [agent.slug for agent in merged.read_manifest().agents]
    assert agents == ["random", "rules", "oracle", "mine"]
    assert verify(merged.path, small_data).problems == []


def test_a_folder_is_joined_as_its_bundle_is_and_fills_what_was_left_out(
    small_run, small_data, tmp_path
):
    folder = tmp_path / "folder"
    shutil.copytree(small_run, folder)
    manifest = RunFolder(folder).read_manifest()
    known, other = (LeftOut(id=id, reason="none") for id in (manifest.environments[0].id, "other"))
    manifest = dataclasses.replace(manifest, left_out=[known, other])
    RunFolder(folder).write_manifest(manifest)
    RunFolder(folder).write_checksums(manifest)
    merged = merge_bundles(tmp_path / "merged", [folder], small_data)
    assert merged.read_manifest().left_out == [other]
    path = folder / "results" / "table" / "rules.jsonl"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DataError, match=r"rules\.jsonl: is no plain file"):
        merge_bundles(tmp_path / "again", [folder], small_data)


def test_the_same_baseline_in_two_bundles_counts_once(bundle, small_data, tmp_path):
    other = bundle_of(tmp_path, small_data, ONLY_ORACLE)
    merged = merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    assert [agent.slug for agent in merged.read_manifest().agents] == ["random", "rules", "oracle"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: oracle, kind: oracle", "name: oracle, kind: random", "names another kind of agent"),
        ("seed: 5", "seed: 6", "protocol: seed is 6, not 5"),
        ("samples_per_task: 2", "samples_per_task: 1", "protocol: samples_per_task is 1, not 2"),
        ("tasks: 2,", "tasks: 1,", "environment 'multi-hop': its num_tasks is 1, not 2"),
        ("id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: test}",
         "id: AgentR1/SyntheticTable-v0, name: table, kwargs: {split: train}",
         "environment 'table': its kwargs is {'split': 'train'}, not {'split': 'test'}"),
    ],
)  # fmt: skip
def test_a_bundle_that_measures_something_else_is_refused_by_name(
    bundle, small_data, tmp_path, old, new, message
):
    other = bundle_of(tmp_path, small_data, ONLY_ORACLE.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    assert "other.zip: " in str(caught.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("concurrency: 3", "concurrency: 5, max_retries: 0"),
        ("name: table, kwargs: {split: test}, tasks: 3,\n     contamination: none",
         "name: table, kwargs: {split: test}, tasks: 3,\n     contamination: none at all"),
    ],
)  # fmt: skip
def test_what_does_not_change_the_measure_keeps_nobody_out(bundle, small_data, tmp_path, old, new):
    text = ONLY_ORACLE.replace("name: oracle", "name: mine").replace("kind: oracle", "kind: random")
    assert old in text
    other = bundle_of(tmp_path, small_data, text.replace(old, new))
    merged = merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    assert [agent.slug for agent in merged.read_manifest().agents][-1] == "mine"
    assert verify(merged.path, small_data).problems == []


def test_two_agents_of_one_name_do_not_become_one(small_data, tmp_path):
    bundles = []
    for kind in ("oracle", "random"):
        (tmp_path / kind).mkdir()
        text = ONLY_ORACLE.replace("name: oracle, kind: oracle", f"name: mine, kind: {kind}")
        bundles.append(bundle_of(tmp_path / kind, small_data, text))
    with pytest.raises(DataError, match="its agent 'mine' is another one"):
        merge_bundles(tmp_path / "merged", bundles, small_data)


def test_an_agent_that_played_fewer_environments_leaves_a_hole(bundle, small_data, tmp_path):
    lines = ONLY_ORACLE.splitlines(keepends=True)
    fewer = "".join(line for line in lines if "HotpotQA" not in line)
    other = bundle_of(tmp_path, small_data, fewer.replace("name: oracle", "name: mine"))
    merged = merge_bundles(tmp_path / "merged", [bundle, other], small_data)
    assert merged.read_manifest().agent("mine").not_played == ["hotpotqa"]
    assert verify(merged.path, small_data).problems == []
    board = summarise(read_run(merged.path))
    assert ("hotpotqa", "mine") not in board.cells
    assert board.overall["mine"] is None


def test_a_bundle_that_was_tampered_with_is_refused_with_the_reason(bundle, small_data, tmp_path):
    def cheat(name, content):
        if name == "results/table/random.jsonl":
            return content.replace(b'"success": false', b'"success": true')
        return content

    cheated = rewritten(bundle, tmp_path / "cheated.zip", cheat)
    with pytest.raises(DataError, match=r"cheated\.zip: is refused") as caught:
        merge_bundles(tmp_path / "merged", [cheated], small_data)
    text = str(caught.value)
    assert "results/table/random.jsonl: its checksum is not that in checksums.json" in text
    assert "field 'success': is true, replay gives false" in text


def test_a_bundle_that_cannot_be_replayed_here_is_refused(bundle, tmp_path):
    with pytest.raises(DataError, match="cannot be verified here: hotpotqa: its data are not at"):
        merge_bundles(tmp_path / "merged", [bundle])


@pytest.mark.parametrize(
    "name",
    ["../evil.json", "/tmp/evil.json", "tasks/../../evil.json", "results/a.jsonl", "work/m.json",
     "results/.x/a.jsonl", "leaderboard.html", "tasks\\x.json", "manifest.json"],
)  # fmt: skip
def test_a_file_that_is_no_part_of_a_run_is_not_unpacked(bundle, small_data, tmp_path, name):
    evil = tmp_path / "evil.zip"
    shutil.copyfile(bundle, evil)
    with zipfile.ZipFile(evil, "a") as archive:
        if name == "manifest.json":
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr(name, "{}")
        else:
            archive.writestr(name, "{}")
    with pytest.raises(DataError, match="is no file of a run, or is there twice"):
        merge_bundles(tmp_path / "out" / "merged", [evil], small_data)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {"evil.zip"}


def test_what_is_no_zip_file_or_unpacks_to_too_much_is_refused(
    bundle, small_data, tmp_path, monkeypatch
):
    path = tmp_path / "text.zip"
    path.write_text("no zip")
    with pytest.raises(DataError, match=r"text\.zip: is no bundle that can be read"):
        merge_bundles(tmp_path / "merged", [path], small_data)
    monkeypatch.setattr("agent_leaderboard.verify.bundle.MAX_BYTES", 1000)
    with pytest.raises(DataError, match=r"unpacks to more than 1,000 bytes"):
        merge_bundles(tmp_path / "merged", [bundle], small_data)


def test_only_a_complete_and_unchanged_run_is_exported(small_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    path = folder / "results" / "table" / "oracle.jsonl"
    path.write_text(path.read_text().replace("maker", "makre"))
    with pytest.raises(DataError, match=r"oracle\.jsonl: is not what checksums\.json says"):
        export_bundle(folder, tmp_path / "a.zip")
    (folder / "checksums.json").unlink()
    with pytest.raises(DataError, match="the run is not complete"):
        export_bundle(folder, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()


def test_a_merged_run_does_not_overwrite(bundle, small_data, tmp_path):
    with pytest.raises(ConfigurationError, match="is there already"):
        merge_bundles(tmp_path, [bundle], small_data)


def test_a_bundle_holds_no_model_and_no_report(bundle):
    with zipfile.ZipFile(bundle) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("manifest.json"))
    assert all(not name.startswith(("work/", "leaderboard.")) for name in names)
    assert len(manifest["agents"]) == 3
