"""Hostile runs: links, pipes, bombs, servers and endless arguments do no harm."""

import dataclasses
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gymnasium.envs.registration import load_env_creator

from agent_envs import ENVIRONMENTS as REGISTERED
from agent_envs import ToolEnv
from agent_envs.errors import DataError
from agent_leaderboard.play.config import PRESETS, load_configs
from agent_leaderboard.play.environments import (
    ARGUMENTS,
    ENVIRONMENTS,
    recorded_environment,
    refused_arguments,
)
from agent_leaderboard.records.manifest import published
from agent_leaderboard.records.results import SCHEMA, read_run
from agent_leaderboard.report.web_page import read_episodes
from agent_leaderboard.verify import contained, verify
from agent_leaderboard.verify.verify import check_run
from tests.agent_leaderboard.runs import edit_manifest, replace_text, write_checksums


def test_a_run_verifies_in_a_child_process(small_run, small_data):
    found = contained.verify(small_run, small_data, jobs=2)
    assert found.problems == []
    assert found.is_whole
    assert found.num_replayed == found.num_episodes == 42


def test_verification_ends_at_its_time_limit(small_run, small_data):
    found = contained.verify(small_run, small_data, max_minutes=0.001)
    assert found.problems == [
        f"{small_run}: could not be verified: it took longer than 0.001 minutes"
    ]


@pytest.mark.parametrize("entry", [None, "", "."])
def test_the_child_imports_no_module_of_the_current_folder(tmp_path, monkeypatch, entry):
    """Such as one with the name of an optional package."""
    own, here = tmp_path / "own", tmp_path / "here"
    for folder in (own, here):
        folder.mkdir()
    (here / "optional_package.py").write_text("")
    (own / "finder.py").write_text(
        "import importlib.util, sys\n"
        "sys.exit(importlib.util.find_spec('optional_package') is not None)\n"
    )
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(own), *([] if entry is None else [entry]), *sys.path])
    monkeypatch.setattr(contained, "_MODULE", "finder")
    assert contained._run_child("{}", 60).startswith("the process ended with 0;")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_the_child_and_what_it_started_end_with_the_parent(tmp_path):
    """A cancelled CI job leaves no process behind."""
    note = tmp_path / "pids"
    (tmp_path / "sleeper.py").write_text(
        "import os, pathlib, signal, subprocess, sys, time\n"
        "from agent_leaderboard.play.run import end_with_parent\n"
        "end_with_parent(lambda: os.killpg(0, signal.SIGKILL))\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}} {{other.pid}}')\n"
        "time.sleep(60)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from agent_leaderboard.verify import contained\n"
        "contained._MODULE = 'sleeper'\n"
        "contained._run_child('{}', 60)\n"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths})
    while not (note.exists() and " " in note.read_text()):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(signal.SIGTERM)
    parent.wait()
    for pid in map(int, note.read_text().split()):
        deadline = time.monotonic() + 100
        while is_running(pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    try:
        os.kill(pid, 0)
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_the_child_limits_itself_and_reaches_no_other_machine(monkeypatch):
    limits = {}
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.update({kind: limit[1]}))
    contained._limit(1.0)
    assert limits[resource.RLIMIT_DATA] <= contained.MAX_MEMORY
    assert limits[resource.RLIMIT_CPU] <= 120
    assert limits[resource.RLIMIT_CORE] == 0
    for address in (("192.0.2.1", 80), ("example.org", 443)):
        with pytest.raises(PermissionError, match="no network"):
            contained._refuse("socket.connect", (None, address))
    with pytest.raises(PermissionError, match="no network"):
        contained._refuse("socket.getaddrinfo", ("example.org", 80, 0, 0, 0))
    contained._refuse("socket.connect", (None, ("127.0.0.1", 80)))  # ScienceWorld's own server
    contained._refuse("socket.connect", (None, "/tmp/socket"))


# Files


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_link(path):
    path.rename(path.parent.parent / "outside")
    path.symlink_to(path.parent.parent / "outside")


def replaced_by_a_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # names of sockets are short
        server.bind(path.name)


def replaced_by_a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "change", [replaced_by_a_pipe, replaced_by_a_link, replaced_by_a_socket, replaced_by_a_folder]
)
@pytest.mark.parametrize("name", ["results.parquet", "manifest.json", "tasks.json"])
def test_only_regular_files_of_some_size_are_opened(copy, small_data, monkeypatch, change, name):
    change(copy / name)
    assert check_run(copy, small_data).problems == [f"{name}: is not a regular file"]
    monkeypatch.setattr(verify, "MAX_FILE_BYTES", 0)
    assert any("is too large" in problem for problem in check_run(copy).problems)


def test_results_that_expand_are_not_decoded(copy):
    """A run-length encoded column of a billion nulls, or of one long text."""
    long = pa.Table.from_pylist(
        [{"environment": "x" * 2**14, "agent": "a"}] * 1_000, schema=SCHEMA
    )  # fmt: skip
    pq.write_table(long, copy / "results.parquet", compression="zstd", store_schema=False)
    write_checksums(copy)
    assert (copy / "results.parquet").stat().st_size < 100_000
    (problem,) = check_run(copy).problems
    assert "has 1000 rows; the run has 42 episodes" in problem
    pq.write_table(long.slice(0, 42), copy / "results.parquet", compression="zstd",
                   store_schema=False)  # fmt: skip
    (problem,) = check_run(copy).problems
    assert "an encoding that results files do not use" in problem


# Manifests


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"samples_per_task": 2', '"samples_per_task": 100000000000'),
        ('"seed": 5', '"seed": ' + "9" * 5_000),
        ('"seed": 5', '"seed": 1e999'),
        ('"num_tasks": 3', '"num_tasks": 100000000000'),
        ('"split": "test"', '"steps": 1e99'),
        ('"split": "test"', '"questions": 100000000'),
        ('"split": "test"', '"render_mode": "human"'),
        ('"split": "test"', '"tools": "os:system"'),
        ('"split": "test"', '"context": {"name": "os:system"}'),
        ('"split": "test"', '"a": ' + '{"a":' * 900 + "1" + "}" * 900),
        ('"split": "test"', '"a": ' + "[" * 100_000),
        ('"split": "test"', '"a": NaN'),
    ],
)
def test_a_hostile_manifest_is_refused_soon(copy, small_data, old, new):
    replace_text(copy / "manifest.json", old, new)
    assert check_run(copy, small_data).problems


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("context", [[], {"name": []}, {"name": {}}]),
        ("attack", [{"attacker": []}, {"attacker": "swap", "budget": 10**400},
                    {"attacker": "os:system"}]),
        ("rewards", [{"exact_match": 10**400}, {"exact_match": float("nan")}]),
        ("max_episode_steps", [float("inf")]),
        ("data", ["${data}/", "${data}//etc/passwd", "${data}/./rows", "${data}/a/../../rows",
                  "${data}/${data}/rows", "${data}/rows\0", "${data}\\rows", "${data}"]),
    ],
)  # fmt: skip
def test_values_of_any_type_and_files_outside_the_data_folder_are_refused(name, values):
    for value in values:
        rows = {"data": "${data}/rows.jsonl"}
        (problem,) = refused_arguments("AgentR1/HotpotQA-v0", rows | {name: value})
        assert f"{name} = " in problem
    assert list(refused_arguments("AgentR1/HotpotQA-v0", {"data": "${data}/a/rows.jsonl"})) == []


def test_no_file_outside_of_the_data_folder_is_read(copy, small_data, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")

    def change(manifest):
        (record,) = [e for e in manifest["environments"] if e["data"]]
        record["data"].append({"name": str(secret), "sha256": "0" * 64})

    edit_manifest(copy, change)
    (problem,) = check_run(copy, small_data).problems  # and not whether its hash is right
    assert "field 'data': is" in problem


def test_no_environment_is_led_to_a_server_and_the_published_arguments_are_allowed():
    for name, argument in (("WebShop", "base_url"), ("Remote", "url"), ("ALFWorld", "base_url"),
                           ("HotpotQA", "retriever")):  # fmt: skip
        assert list(refused_arguments(f"AgentR1/{name}-v0", {argument: "http://127.0.0.1:8000"}))
    configured = [one for path in PRESETS.values() for one in load_configs([path]).environments]
    for record in (*published().environments, *configured):
        assert list(refused_arguments(record.id, record.kwargs)) == []


def test_every_environment_without_a_server_or_a_victim_is_allowed():
    registered = {re.sub(r"^AgentR1/(\w+)-v\d+$", r"\1", spec.id) for spec in REGISTERED}
    assert registered - set(ENVIRONMENTS) == {"WebShop", "AdversarialEdits"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_only_listed_arguments_are_allowed_and_all_own_arguments_are_listed(name):
    id = f"AgentR1/{name}-v0"
    allowed = {"data": "${data}/rows", "split": "test", "tool_format": "hermes"}
    assert list(refused_arguments(id, allowed)) == []
    for hostile in ({"render_mode": "human"}, {"tools": ["x"]}, {"split": ["test"] * 1_000},
                    {"data": "/etc/passwd"}, {"corpus": ["${data}/../x"]},
                    {"sandbox": "limits"}, {"system_prompt": "x" * 100_000},
                    {"max_episode_steps": 10**9}, {"vectorization_mode": "async"}):  # fmt: skip
        assert list(refused_arguments(id, hostile)), hostile
    env = load_env_creator(gym.spec(id).entry_point)
    for cls in env.__mro__[: env.__mro__.index(ToolEnv)]:
        taken = inspect.signature(vars(cls).get("__init__", object)).parameters.values()
        own = {each.name for each in taken if each.kind is each.KEYWORD_ONLY}
        assert own - {"tools"} <= ARGUMENTS.keys()  # `tools` is refused above


HOSTILE = {
    "an address": ({"data": "http://192.0.2.1/rows.jsonl"}, False, "is not allowed"),
    "a download": ({}, False, "'data' is missing"),
    "no files": ({"data": []}, False, "'data' is missing"),
    "a file to be shown": ({"data": "${data}/hotpot.jsonl"}, True, "'is_text_public'"),
    "a file in a prompt": (
        {"data": "${data}/hotpot.jsonl", "system_prompt": '"${data}/../secret"'},
        False,
        "system_prompt = ",
    ),
}
"""Arguments, whether the text is declared to be public, and why they are refused."""


@pytest.mark.parametrize("name", HOSTILE)
def test_no_manifest_becomes_an_environment_without_the_allowlist(run_folder, data_folder, name):
    """Not in a report of a stranger's run, either."""
    kwargs, is_text_public, message = HOSTILE[name]
    run = read_run(run_folder)
    public, licensed = run.manifest.environments
    hostile = dataclasses.replace(licensed, kwargs=kwargs, is_text_public=is_text_public)
    with pytest.raises(DataError, match=message):
        recorded_environment(hostile, None, data_folder)
    hostile = dataclasses.replace(hostile, is_text_public=True)
    manifest = dataclasses.replace(run.manifest, environments=[public, hostile])
    run = dataclasses.replace(run, manifest=manifest)
    for one in read_episodes(run, (hostile.slug, "some"), data_folder):
        assert one["question"] is None
        assert one["note"].startswith("Replay failed")


def test_a_report_is_written_within_limits(small_data, copy):
    assert "oracle" in contained.report(copy, small_data)
    assert (copy / "leaderboard.html").exists()
    with pytest.raises(DataError, match=r"could not be reported: it took longer than 0\.001"):
        contained.report(copy, small_data, max_minutes=0.001)
    (copy / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        contained.report(copy)
