"""Verification: whatever is changed in a run is found, also where its checksums were made anew."""

import dataclasses
import json
import re
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.reference import reference_text
from agent_leaderboard.records.results import write_line
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run as verify
from tests.agent_leaderboard.small_config import write_config

FILES = [
    f"results/{environment}/{agent}.jsonl"
    for environment in ("table", "multi-hop", "hotpotqa")
    for agent in ("random", "rules", "oracle")
]
SCORED = (
    "task_id", "task_sha256", "seed", "actions", "rewards", "reward_terms", "errors", "metrics",
    "return", "success", "stop_reason", "labels", "environment", "agent",
)  # fmt: skip
"""Every field that says what was played, and what it earned."""


@pytest.fixture
def copy(tmp_path, small_run):
    folder = tmp_path / "copy"
    shutil.copytree(small_run, folder)
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, records):
    path.write_text("".join(map(write_line, records)))


def seal(folder):
    """Make the checksums anew, as one would who wants to hide a change."""
    names = json.loads((folder / "checksums.json").read_text())
    digests = {name: file_sha256(folder / name) for name in names}
    (folder / "checksums.json").write_text(json.dumps(digests))


def seal_tasks(folder, environment):
    """Make the hash of a task list in the manifest anew."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for record in manifest["environments"]:
        if record["slug"] == environment:
            record["tasks_sha256"] = file_sha256(folder / "tasks" / f"{environment}.json")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    seal(folder)


def test_a_run_as_it_was_made_verifies_and_every_episode_is_replayed(small_run, small_data):
    verification = verify(small_run, small_data)
    assert verification.problems == []
    assert verification.num_replayed == verification.num_episodes == 3 * (6 + 4 + 4)
    assert "Verified in full: 42 of 42" in verification.summary()


def test_two_processes_find_the_same(copy, small_data):
    path = copy / FILES[2]
    records = read(path)
    records[1]["success"] = False
    write(path, records)
    assert verify(copy, small_data, jobs=2).problems == verify(copy, small_data).problems != []


def test_without_data_the_rest_is_replayed_and_it_says_what_was_not(small_run, small_data, copy):
    verification = verify(small_run)
    assert verification.problems == []
    assert verification.num_replayed == 30
    assert "NOT replayed: hotpotqa: its data are not at hand; pass --data" in verification.summary()
    assert "Verified IN PART: 30 of 42" in verification.summary()
    assert not verification.is_whole
    path = copy / FILES[6]
    path.write_text(path.read_text().replace("0.0", "0.5", 1))
    assert verify(copy).problems == [f"{FILES[6]}: its checksum is not that in checksums.json"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_changed_value_is_found_with_file_line_and_field(data, small_run, small_data, tmp_path):
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small_run, folder)
    name = data.draw(st.sampled_from(FILES), label="file")
    records = read(folder / name)
    number = data.draw(st.integers(0, len(records) - 1), label="line")
    field = data.draw(st.sampled_from(SCORED), label="field")
    records[number][field] = data.draw(changed(records[number][field]), label="value")
    write(folder / name, records)
    is_hidden = data.draw(st.booleans(), label="checksums made anew")
    if is_hidden:
        seal(folder)
    problems = verify(folder, small_data).problems
    place = f"{name}, line {number + 1}"
    assert any(problem.startswith(place) and f"'{field}" in problem for problem in problems) or (
        # an action changes what follows from it: that it does not fit is found there
        field in ("actions", "success", "labels", "seed")
        and any(problem.startswith(place) for problem in problems)
    )
    assert is_hidden or f"{name}: its checksum is not that in checksums.json" in problems


def changed(value):
    """Draw another value of the same kind, somewhere inside where it is nested."""
    match value:
        case bool():
            return st.just(not value)
        case int() | float():
            return st.just(value + 1)
        case str():
            return st.sampled_from([value + "x", value[:-1]])
        case None:
            return st.just("bad_json")
        case [*items]:
            shorter = st.just(items[:-1])
            inside = st.integers(0, len(items) - 1).flatmap(
                lambda i: changed(items[i]).map(lambda new: [*items[:i], new, *items[i + 1 :]])
            )
            return shorter | inside
        case {**members} if members:
            return st.sampled_from(sorted(members)).flatmap(
                lambda key: changed(members[key]).map(lambda new: {**members, key: new})
            )
    return st.just({"more": 1.0})


def drop(records):
    del records[1]


def double(records):
    records.insert(1, records[0])


def swap(records):
    records[0], records[1] = records[1], records[0]


def other_task(records):
    records[0]["task"] = 77


def claim_fault(records):
    records[0]["error"] = "OSError: the server was away"


def change_labels(records):
    records[0]["labels"] = {"hops": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "table/random.jsonl: task 0, sample 1 is missing"),
        (double, "table/random.jsonl, line 2, field 'task': task 0 is there twice"),
        (swap, "table/random.jsonl, line 1, field 'task': episodes are not in the order"),
        (other_task, r"table/random.jsonl, line 1, field 'task': \(77, 0\) is not listed"),
        (claim_fault, "table/random.jsonl, line 1, field 'error'"),
        (change_labels, "table/random.jsonl, line 1, field 'labels'"),
    ],
)
def test_lines_that_are_missing_added_or_moved_are_found(copy, small_data, change, message):
    path = copy / FILES[0]
    records = read(path)
    change(records)
    write(path, records)
    seal(copy)
    verification = verify(copy, small_data)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(verification.problems))


def test_agents_whose_results_are_exchanged_are_found_even_under_their_new_names(copy, small_data):
    one, other = copy / FILES[0], copy / FILES[2]
    records = {"oracle": read(one), "random": read(other)}
    for path, agent in ((one, "random"), (other, "oracle")):
        write(path, [record | {"agent": agent} for record in records[agent]])
    seal(copy)
    problems = verify(copy, small_data).problems
    assert any(f"{FILES[0]}, line 1, field 'actions': are not what the" in p for p in problems)
    assert any(f"{FILES[2]}, line 1, field 'actions': are not what the" in p for p in problems)
    write(one, records["random"])  # which say that they are the oracle's
    seal(copy)
    assert any(
        "field 'agent': is 'oracle', must be" in p for p in verify(copy, small_data).problems
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"task": 1,', '"task": 2,', "tasks/table.json"),
        ('"sha256": "', '"sha256": "0', "field 'sha256'"),
        ('"task_id": "Syn', '"task_id": "syn', "field 'task_id'"),
        ('"hops": 2', '"hops": 3', "field 'labels'"),
    ],
)
def test_a_changed_task_list_is_found_also_under_a_new_hash(copy, small_data, old, new, message):
    path = copy / "tasks" / "table.json"
    path.write_text(path.read_text().replace(old, new))
    text = "\n".join(verify(copy, small_data).problems)
    assert "tasks/table.json: is not the task list of the manifest (field 'tasks_sha256')" in text
    seal_tasks(copy, "table")
    assert message in "\n".join(verify(copy, small_data).problems)


def test_a_shorter_task_list_with_fewer_results_is_found(copy, small_data):
    """Who leaves out what was not solved must at least say how many tasks there are."""
    path = copy / "tasks" / "table.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:2], indent=2) + "\n")
    for agent in ("random", "rules", "oracle"):
        results = copy / "results" / "table" / f"{agent}.jsonl"
        write(results, read(results)[:4])
    seal_tasks(copy, "table")
    assert "tasks/table.json: has 2 tasks; manifest.json, field 'num_tasks' says 3" in (
        verify(copy, small_data).problems
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seed": 5', '"seed": 6', "field 'seed'"),
        ('"samples_per_task": 2', '"samples_per_task": 1', "is not listed"),
        ('"samples_per_task": 2', '"samples_per_task": 0', "should be greater than or equal to 1"),
        ('"exact_match": 1.0', '"exact_match": 2.0', "field 'reward_terms'"),
        ('"max_turns": 6', '"max_turns": 7', "field 'max_turns'"),
        ('"split": "test"', '"split": "train"', "field 'sha256'"),
        ('"split": "test"', '"splt": "test"', "splt"),
        ('"split": "test"', '"sandbox": "limits"', "'sandbox' is no argument that is taken"),
        ('"${data}/hotpot.jsonl"', '"/etc/passwd"', "no value that is taken from others"),
        ('"${data}/hotpot.jsonl"', '"${data}/../x"', "no value that is taken from others"),
        ('"AgentR1/SyntheticTable-v0"', '"os:AgentR1/X-v0"', "is not played for others"),
        ('"slug": "rules"', '"slug": "../rules"', "no plain name"),
        ('"slug": "rules"', '"slug": "oracle"', "two of the slug"),
        ('"kind": "random"', '"kind": "oracle"', "field 'actions': are not what"),
        ('"format_version": 3', '"format_version": 4', "'format_version' is 4"),
        ('"num_tasks": 3', '"num_tasks": "3"', "is not in the form"),
        ('"num_tasks": 3', '"num_tasks": 4', "says 4"),
        ('"left_out"', '"left_ou"', "left_ou"),
        ('"hotpot.jsonl"', '"hotpt.jsonl"', "no file of the arguments"),
    ],
)
def test_a_changed_manifest_is_found(copy, small_data, old, new, message):
    path = copy / "manifest.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    seal(copy)
    assert message in "\n".join(verify(copy, small_data).problems)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "notes.txt: is no file of this run"),
        (".hidden", ".hidden: is no file of this run"),
        ("Manifest.json", "Manifest.json: is no file of this run"),
        ("results.jsonl", "results.jsonl: is no file of this run"),
        ("tasks/other.json", "tasks/other.json: is no file of this run"),
        ("results/table/else.jsonl", "results/table/else.jsonl: is no file of this run"),
        ("results/else/rules.jsonl", "results/else: is no folder of this run"),
        ("models/a/b", "models: is no folder of this run"),
        ("results/work/x", "results/work: is no folder of this run"),
        ("empty/", "empty: is no folder of this run"),
    ],
)
def test_what_is_no_part_of_a_run_is_found(copy, small_data, name, message):
    path = copy / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if name.endswith("/") else path.write_text("x")
    assert message in verify(copy).problems


def test_pages_and_what_a_run_keeps_for_itself_are_no_foreign_files(copy, small_data):
    write_reports(copy, small_data, text=True)
    (copy / "work" / "model").mkdir(parents=True)
    (copy / "work" / "model" / "model.safetensors").write_text("x")
    assert {path.name for path in copy.glob("*.html")} == {
        "leaderboard.html", "leaderboard_with_text.html"
    }  # fmt: skip
    assert verify(copy, small_data).problems == []
    shutil.rmtree(copy / "work")
    (copy / "work").write_text("no folder")
    assert verify(copy).problems == ["work: is no file of this run"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 3: is not valid JSON"),
        ("[]", "line 3: is no JSON object"),
        ("{}", "line 3: field 'environment'"),
        ("[" * 100_000, "line 3: is not valid JSON"),
    ],
)
def test_a_malformed_line_is_found(copy, small_data, text, message):
    path = copy / FILES[0]
    lines = path.read_text().splitlines()
    lines[2] = text
    path.write_text("\n".join(lines) + "\n")
    assert message in "\n".join(verify(copy, small_data).problems)


def test_a_cut_line_a_missing_file_and_a_file_too_many_are_found(copy, small_data):
    path = copy / FILES[0]
    path.write_text(path.read_text()[:-20])
    (copy / FILES[1]).unlink()
    (copy / "results" / "table" / "champion.jsonl").write_text("")
    text = "\n".join(verify(copy, small_data).problems)
    assert "line 6: is cut off" in text
    assert f"{FILES[1]}: cannot be read" in text
    assert "results/table/champion.jsonl: is no file of this run" in text


def test_other_data_than_the_run_used_are_found(copy, small_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(small_data, data)
    path = data / "hotpot.jsonl"
    path.write_text(path.read_text().replace("Norway", "Sweden"))
    text = "\n".join(verify(copy, data).problems)
    assert "hotpot.jsonl is another file than the run used (SHA-256)" in text
    assert "tasks/hotpotqa.json, entry 1, field 'sha256'" in text


def test_a_run_that_is_not_complete_says_so(copy, small_data):
    (copy / "checksums.json").unlink()
    assert "the run is not complete" in verify(copy, small_data).summary()


def test_costs_are_checked_against_the_price_table(tmp_path):
    """Tokens stay on trust; that they cost what the prices say does not."""
    text = (
        "environments: [{id: AgentR1/SyntheticTable-v0, name: table, tasks: 1, contamination: x}]\n"
        "agents: [{name: rules, kind: heuristic}]\n"
    )
    folder = run(load_configs([write_config(tmp_path, text)]), tmp_path / "run")
    path = folder.results_path("table", "rules")
    (record,) = read(path)
    record["usage"] |= {"money": 0.5, "calls": -1}
    write(path, [record])
    text = "\n".join(verify(folder.path).problems)
    assert "line 1, field 'usage.money': is 0.5, the prices give None" in text
    assert "line 1, field 'usage.calls': is negative" in text
    assert isinstance(folder, RunFolder)


def test_a_price_below_nothing_is_refused(copy):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["agents"][0]["prices"] = {"prompt": -5.0, "completion": 0.0, "currency": "USD"}
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    (problem,) = verify(copy).problems
    assert "agents.0.prices.prompt" in problem
    assert "greater than or equal to 0" in problem


def test_seconds_that_no_sum_holds_are_refused(copy, small_data):
    path = copy / "seconds" / "table" / "random.jsonl"
    write(path, [record | {"seconds": 1e308} for record in read(path)])
    (problem,) = verify(copy, small_data).problems
    assert problem.startswith("seconds/table/random.jsonl, line 1: field 'seconds'")


@pytest.mark.parametrize("names", [("agents",), ("agents", "environments")])
def test_a_run_of_nothing_is_not_verified(copy, names):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text()) | {name: [] for name in names}
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    for name in ("results", "seconds", *(["tasks"] if len(names) > 1 else [])):
        shutil.rmtree(copy / name)
    kept = {file.relative_to(copy).as_posix(): "" for file in copy.glob("tasks/*.json")}
    (copy / "checksums.json").write_text(json.dumps(kept | {"manifest.json": ""}))
    seal(copy)
    assert any("nothing to verify" in problem for problem in verify(copy).problems)


@pytest.mark.parametrize(
    ("attack", "attack_on", "said"),
    [
        ("edits", "hotpotqa", "name no attacker"),
        ("injection", "hotpotqa", "is not the same without an attack"),
        ("injection", "table", "is not the same without an attack"),
        ("injection", None, "one is given without the other"),
    ],
)
def test_an_environment_that_is_no_attack_is_not_taken_for_one(
    copy, small_data, attack, attack_on, said
):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    (record,) = [e for e in manifest["environments"] if e["slug"] == "table"]
    record |= {"attack": attack, "attack_on": attack_on}
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    seal(copy)
    problems = verify(copy, small_data).problems
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "checksums.json", "tasks/table.json", FILES[1], "seconds/table/rules.jsonl"],
)
def test_json_that_says_a_thing_twice_is_refused(copy, name):
    """One reader takes the first, another one the last."""
    path = copy / name
    path.write_text(re.sub(r'("\w[^"]*"): ', r'\1: "x", \1: ', path.read_text(), count=1))
    if name != "checksums.json":
        seal(copy)
    assert any("an object has a key twice" in problem for problem in verify(copy).problems)


def test_a_number_that_is_written_otherwise_is_found(copy):
    path = copy / "results" / "table" / "random.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"rewards": [0.0', '"rewards": [-0.0', 1))
    assert path.read_text() != text
    seal(copy)
    (problem,) = verify(copy).problems
    assert "field 'rewards': is [-0.0" in problem


def test_a_page_with_text_that_was_edited_is_found(copy, small_data):
    write_reports(copy, small_data, text=True)
    page = copy / "leaderboard_with_text.html"
    page.write_text(page.read_text().replace("<h1>Leaderboard", "<h1>Winners"))
    (problem,) = verify(copy, small_data).problems
    assert problem.startswith("leaderboard_with_text.html: is not what the results give")
    (problem,) = verify(copy).problems
    assert "leaderboard_with_text.html: cannot be made again here" in problem


@pytest.mark.parametrize("field", ["organisation", "made_by", "url"])
def test_text_of_any_length_is_no_name(copy, field):
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["agents"][1][field] = "https://" + "a" * 2_000
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    (problem,) = verify(copy).problems
    assert f"field 'agents.1.{field}': String should have at most 2000 characters" in problem


def test_lines_without_end_are_not_read_to_the_end(copy):
    path = copy / "results" / "table" / "rules.jsonl"
    path.write_text(path.read_text() + "{}\n" * 10_000)
    seal(copy)
    problems = verify(copy).problems
    assert "results/table/rules.jsonl, line 113: there are 6 episodes" in problems
    assert len(problems) < 200


def test_what_a_board_has_and_a_run_has_not_stays_on_trust(copy, small_data, tmp_path):
    whole = tmp_path / "reference.json"
    whole.write_text(reference_text(RunFolder(copy).read_manifest()))
    (copy / "tasks" / "table.json").unlink()
    for part in ("results", "seconds"):
        shutil.rmtree(copy / part / "table")
    manifest = RunFolder(copy).read_manifest()
    kept = [one for one in manifest.environments if one.slug != "table"]
    manifest = dataclasses.replace(manifest, environments=kept)
    RunFolder(copy).write_manifest(manifest)
    RunFolder(copy).write_checksums(manifest)
    found = verify(copy, small_data, reference=whole)
    assert found.problems == []
    assert found.on_trust == ["that the run did not play table, which the board has"]
