"""Hostile runs: links, pipes, bombs, servers and endless arguments do no harm and end."""

import hashlib
import inspect
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import zipfile

import gymnasium as gym
import pytest
from gymnasium.envs.registration import load_env_creator

from agent_envs import ToolEnv
from agent_leaderboard.verify import bundle, contained, folder_check
from agent_leaderboard.verify.arguments import ARGUMENTS, check_arguments
from agent_leaderboard.verify.verify import check_run
from tests.agent_leaderboard.test_verify import seal


@pytest.fixture
def copy(tmp_path, small_run):
    folder = tmp_path / "copy"
    shutil.copytree(small_run, folder)
    return folder


def test_a_run_and_its_bundle_verify_in_a_process_of_their_own(small_run, small_data, tmp_path):
    packed = tmp_path / "run.zip"
    bundle.export_bundle(small_run, packed)
    found = contained.verify(packed, small_data)
    assert found.problems == []
    assert found.is_whole
    assert found.num_replayed == found.num_episodes == 42
    assert found.scores == check_run(small_run, small_data).scores
    assert not list(tmp_path.glob("*/results"))


def test_what_takes_too_long_is_ended_with_all_it_started(small_run, small_data):
    began = time.monotonic()
    found = contained.verify(small_run, small_data, max_minutes=0.001)
    assert found.problems == [
        f"{small_run}: could not be verified: it took longer than 0.001 minutes"
    ]
    assert time.monotonic() - began < 60


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_ends_it_ends_the_child_too(tmp_path, monkeypatch, number):
    """A job of CI that is cancelled, or a closed terminal, leaves no process behind."""
    note = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(contained, "_MODULE", "sleeper")

    def end():
        while not (note.exists() and note.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=end).start()
    before = signal.getsignal(number)
    with pytest.raises(SystemExit):
        contained._run_child("{}", 60)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert signal.getsignal(number) is before


def test_the_child_limits_itself(monkeypatch):
    limits = {}
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: limits.update({kind: limit[1]}))
    contained._limit(1.0)
    assert limits[resource.RLIMIT_DATA] <= contained.MAX_MEMORY
    assert limits[resource.RLIMIT_CPU] <= 120
    assert limits[resource.RLIMIT_CORE] == 0


def test_no_other_machine_is_reached():
    for address in (("192.0.2.1", 80), ("example.org", 443)):
        with pytest.raises(PermissionError, match="no network"):
            contained._refuse("socket.connect", (None, address))
    with pytest.raises(PermissionError, match="no network"):
        contained._refuse("socket.getaddrinfo", ("example.org", 80, 0, 0, 0))
    contained._refuse("socket.connect", (None, ("127.0.0.1", 80)))  # ScienceWorld's own program
    contained._refuse("socket.connect", (None, "/tmp/socket"))


def replaced_by_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_link(path):
    path.rename(path.with_suffix(".moved"))
    shutil.move(path.with_suffix(".moved"), path.parents[2].parent / "outside")
    path.symlink_to(path.parents[2].parent / "outside")


def in_a_linked_folder(path):
    folder, outside = path.parent, path.parents[2].parent / "outside"
    shutil.move(folder, outside)
    folder.symlink_to(outside)


def replaced_by_a_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # names of sockets are short
        server.bind(path.name)


@pytest.mark.parametrize(
    "change", [replaced_by_a_pipe, replaced_by_a_link, in_a_linked_folder, replaced_by_a_socket]
)
@pytest.mark.parametrize("name", ["results/table/random.jsonl", "seconds/table/random.jsonl"])
def test_only_plain_files_are_opened(copy, small_data, change, name):
    change(copy / name)
    (problem,) = check_run(copy, small_data).problems
    assert problem.endswith("is no plain file")


def test_a_manifest_that_is_a_pipe_blocks_nobody(copy):
    replaced_by_a_pipe(copy / "manifest.json")
    assert check_run(copy).problems == ["manifest.json: is no plain file"]


def test_a_run_of_too_many_or_too_large_files_is_not_read(copy, monkeypatch):
    monkeypatch.setattr(folder_check, "MAX_FILE_BYTES", 1_000)
    assert "manifest.json: is too large" in check_run(copy).problems
    monkeypatch.setattr(folder_check, "MAX_FILES", 5)
    (problem,) = [p for p in check_run(copy).problems if "too large" not in p]
    assert "holds more than 5 files" in problem


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
        ('"split": "test"', '"context": ' + '{"a":' * 200 + "1" + "}" * 200),
    ],
)
def test_a_hostile_manifest_is_a_problem_and_ends_soon(copy, small_data, old, new):
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace(old, new))
    seal(copy)
    assert check_run(copy, small_data).problems


def test_a_manifest_nested_too_deep_or_with_no_number_is_said_to_be(copy):
    path = copy / "manifest.json"
    text = path.read_text()
    for value, said in (
        ('{"a":' * 900 + "1" + "}" * 900, "nested deeper than"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"a": NaN}', "NaN is no number"),
    ):
        path.write_text(text.replace('"kwargs": {', f'"kwargs": {{"a": {value}, ', 1))
        (problem,) = check_run(copy).problems
        assert said in problem


@pytest.mark.parametrize(
    "kwargs",
    [
        {"context": []},
        {"context": {"name": []}},
        {"context": {"name": {}}},
        {"attack": {"attacker": []}},
        {"attack": {"attacker": "swap", "budget": 10**400}},
        {"attack": {"attacker": "os:system"}},
        {"rewards": {"exact_match": 10**400}},
        {"rewards": {"exact_match": float("nan")}},
        {"max_episode_steps": float("inf")},
    ],
)
def test_values_of_any_type_are_refused_and_named(kwargs):
    (name,) = kwargs
    (problem,) = check_arguments("AgentR1/SyntheticTable-v0", kwargs)
    assert f"{name} = " in problem


@pytest.mark.parametrize(
    "value",
    [
        "${data}/",
        "${data}//etc/passwd",
        "${data}/./rows",
        "${data}/a/../../rows",
        "${data}/${data}/rows",
        "${data}/rows\0",
        "${data}\\rows",
        "${data}",
    ],
)
def test_a_data_file_is_named_plainly_below_the_data_folder(value):
    assert list(check_arguments("AgentR1/HotpotQA-v0", {"data": "${data}/a/rows.jsonl"})) == []
    assert list(check_arguments("AgentR1/HotpotQA-v0", {"data": value}))


def test_no_file_outside_of_the_data_folder_is_compared(copy, small_data, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    (record,) = [e for e in manifest["environments"] if e["data"]]
    record["kwargs"]["data"] = [record["kwargs"]["data"], "${data}/"]
    for content in (b"s", b"t"):
        digest = hashlib.sha256(content).hexdigest()
        record["data"] = [*record["data"][:1], {"name": str(secret), "sha256": digest}]
        path.write_text(json.dumps(manifest, indent=2) + "\n")
        seal(copy)
        problems = check_run(copy, small_data).problems
        assert any("no value that is taken from others" in problem for problem in problems)
        assert not any("secret" in problem for problem in problems)


def test_a_line_of_huge_numbers_is_a_problem(copy, small_data):
    path = copy / "results" / "table" / "random.jsonl"
    lines = path.read_text().splitlines()
    for key, value in (("task", 10**40), ("seed", -(10**40)), ("sample", 2**40)):
        record = json.loads(lines[0]) | {key: value}
        path.write_text("\n".join([json.dumps(record, sort_keys=True), *lines[1:]]) + "\n")
        seal(copy)
        assert any(f"'{key}'" in problem for problem in check_run(copy, small_data).problems)


SERVED = {"WebShop": "base_url", "Remote": "url", "ALFWorld": "base_url", "HotpotQA": "retriever"}


@pytest.mark.parametrize("name", SERVED)
def test_no_environment_is_led_to_a_server(name):
    kwargs = {SERVED[name]: "http://127.0.0.1:8000"}
    assert list(check_arguments(f"AgentR1/{name}-v0", kwargs))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_on_no_list_is_refused_for_every_environment(name):
    id = f"AgentR1/{name}-v0"
    assert list(check_arguments(id, {"split": "test", "tool_format": "hermes"})) == []
    for hostile in ({"render_mode": "human"}, {"tools": ["x"]}, {"split": ["test"] * 1_000},
                    {"data": "/etc/passwd"}, {"corpus": ["${data}/../x"]},
                    {"sandbox": "limits"}, {"system_prompt": "x" * 100_000},
                    {"max_episode_steps": 10**9}, {"vectorization_mode": "async"}):  # fmt: skip
        assert list(check_arguments(id, hostile)), hostile


@pytest.mark.parametrize("name", ARGUMENTS)
def test_whatever_an_environment_takes_of_its_own_is_on_the_list(name):
    env = load_env_creator(gym.spec(f"AgentR1/{name}-v0").entry_point)
    known = {*ARGUMENTS[name], "split"}
    for cls in env.__mro__[: env.__mro__.index(ToolEnv)]:
        taken = inspect.signature(vars(cls).get("__init__", object)).parameters.values()
        assert {each.name for each in taken if each.kind is each.KEYWORD_ONLY} <= known


def test_the_published_arguments_are_on_the_list():
    from agent_leaderboard.play.config import PRESETS, load_configs
    from agent_leaderboard.records.reference import published

    of_presets = [one for path in PRESETS.values() for one in load_configs([path]).environments]
    for record in (*published().environments, *of_presets):
        assert list(check_arguments(record.id, record.kwargs)) == []


def test_a_bundle_of_many_empty_files_is_refused_at_once(tmp_path):
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(folder_check.MAX_FILES + 1):
            archive.writestr(f"tasks/t{number}.json", "")
    (problem,) = contained.check(path, unpack_to=tmp_path / "out").problems
    assert "holds more than 20,000 files" in problem


def test_a_bundle_that_unpacks_to_much_is_refused_before_it_does(tmp_path):
    path = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("manifest.json", "w") as file,
    ):
        for _ in range(258):
            file.write(bytes(2**20))
    (problem,) = contained.check(path, unpack_to=tmp_path / "out").problems
    assert "'manifest.json' unpacks to more than" in problem
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_lies_about_a_size_or_holds_a_link_is_refused(tmp_path, small_run):
    path = tmp_path / "link.zip"
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("manifest.json")
        entry.external_attr = 0o120777 << 16
        archive.writestr(entry, "/etc/passwd")
    (problem,) = contained.check(path, unpack_to=tmp_path / "out").problems
    assert "is no file of a run" in problem
    good = tmp_path / "good.zip"
    bundle.export_bundle(small_run, good)
    content = bytearray(good.read_bytes())
    with zipfile.ZipFile(good) as archive:
        entry = archive.getinfo("manifest.json")
    at = content.rindex(entry.file_size.to_bytes(4, "little"))
    content[at : at + 4] = (7).to_bytes(4, "little")
    good.write_bytes(content)
    assert contained.check(good, unpack_to=tmp_path / "out2").problems
