"""Verification finds every change of a run, even if its checksums were made again."""

import dataclasses
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_envs.core.replay import ReplayedStep
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_leaderboard.agents.agent import is_recounted
from agent_leaderboard.play.episodes import ReplayedEpisode
from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Protocol,
)
from agent_leaderboard.records.results import (
    SCHEMA,
    EpisodeResult,
    Run,
    read_run,
    task_list_sha256,
    write_run,
)
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify import claims
from agent_leaderboard.verify.verify import _jobs as make_jobs
from agent_leaderboard.verify.verify import check_episodes
from agent_leaderboard.verify.verify import check_run as verify
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.runs import (
    edit_manifest,
    read_rows,
    replace_text,
    write_checksums,
    write_rows,
)

PUBLISHED_RUN = Path(__file__).parents[2] / "benchmarks" / "results" / "leaderboard"
SCORED = (
    "actions", "rewards", "reward_terms", "errors", "metrics", "return", "success", "stop_reason",
    "environment", "agent",
)  # fmt: skip
"""Every column with the actions and their scores."""


def text_of(folder, *arguments, **options):
    return "\n".join(verify(folder, *arguments, **options).problems)


def test_an_unchanged_run_verifies_and_every_episode_is_replayed(small_run, small_data):
    verification = verify(small_run, small_data)
    assert verification.problems == []
    assert verification.num_replayed == verification.num_episodes == 3 * (6 + 4 + 4)
    assert "Verified in full: 42 of 42" in verification.summary()


@pytest.mark.parametrize("slug", ["command-line", "synthetic-multi-hop", "synthetic-table-edited"])
def test_published_episodes_still_replay(slug):
    """A change of an environment needs the published run again."""
    run = read_run(PUBLISHED_RUN)
    others = {one.slug: "" for one in run.manifest.environments if one.slug != slug}
    job, *_ = (one for one in make_jobs(run, others, None) if one[0].agent.kind == "heuristic")
    chunk, results = dataclasses.replace(job[0], episodes=job[0].episodes[:3]), job[1][:3]
    assert check_episodes((chunk, results)) == ([], 0)


def test_without_data_the_rest_is_replayed_and_changes_break_the_checksum(small_run, copy):
    verification = verify(small_run)
    assert verification.problems == []
    assert verification.num_replayed == 30
    assert "hotpotqa: its data are missing: hotpot.jsonl; pass --data" in verification.summary()
    assert "Verified IN PART: 30 of 42" in verification.summary()
    assert not verification.is_whole
    rows, own = read_rows(copy, "hotpotqa", "random")
    own[0]["metrics"]["f1"] = 0.5
    write_rows(copy, rows, hide=False)
    assert verify(copy).problems == [
        "results.parquet: does not match its checksum in checksums.json"
    ]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_changed_value_is_found(data, small_run, small_data, tmp_path):
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(small_run, folder)
    rows, _ = read_rows(folder)
    number = data.draw(st.integers(0, len(rows) - 1), label="row")
    field = data.draw(st.sampled_from(SCORED), label="field")
    row = rows[number]
    place = f"{row['environment']}/{row['agent']}, task {row['task']}, sample {row['sample']}"
    row[field] = data.draw(changed(row[field]), label="value")
    write_rows(folder, rows)
    problems = verify(folder, small_data).problems
    if field in ("environment", "agent", "stop_reason"):
        assert problems
    else:
        # a changed action is found by what follows from it
        assert any(place in p and (field in ("actions", "success") or field in p) for p in problems)


def changed(value):
    """Draw another value of the same kind, somewhere inside a nested one."""
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


ROW_CHANGES = {
    "dropped": (lambda rows: rows.pop(1), "table/random, task 0, sample 1: is missing, rep"),
    "doubled": (lambda rows: rows.__setitem__(1, rows[0]), "task 0, sample 1: is missing, rep"),
    "swapped": (lambda rows: rows.insert(1, rows.pop(0)), "task 0, sample 0: is missing, rep"),
    "other task": (lambda rows: rows[0].update(task=77), "task 0, sample 0: is missing, rep"),
    "claimed fault": (lambda rows: rows[0].update(error="OSError: away"), "field 'error'"),
    "invented cost": (lambda rows: rows[0].update(calls=1, money=0.5), "the prices give None"),
    "negative cost": (lambda rows: rows[0].update(calls=-1), "field 'calls': Input should be gr"),
    "long episode": (lambda rows: rows[0].update(seconds=1e308), "field 'seconds'"),
    "other number": (
        lambda rows: rows[0]["rewards"].__setitem__(0, -0.0), "field 'rewards': is [-0.0"
    ),
    "huge task": (lambda rows: rows[0].update(task=2**40), "field 'task'"),
    "more rows": (lambda rows: rows.extend(rows[-1:] * 50), "the run has 42 episodes"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_CHANGES)
def test_missing_added_moved_and_impossible_episodes_are_found(copy, small_data, name):
    change, message = ROW_CHANGES[name]
    rows, _ = read_rows(copy)  # those of table/random come first
    change(rows)
    write_rows(copy, rows)
    assert message in text_of(copy, small_data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "row 3, field 'rewards': is not valid JSON"),
        ("{}", "row 3: field 'rewards'"),
        ("[" * 100_000, "is not valid JSON"),
        ("[0.0,0.0]", "is not in the canonical form"),
        ("[NaN]", "NaN is not a JSON number"),
        ('[{"a": 1, "a": 2}]', "an object repeats a key"),
    ],
)
def test_a_malformed_row_is_found(copy, small_data, text, message):
    rows = pq.read_table(copy / "results.parquet").to_pylist()
    rows[2]["rewards"] = text
    write_table(copy, pa.Table.from_pylist(rows, schema=SCHEMA))
    assert message in text_of(copy, small_data)


def write_table(folder, table, **options):
    settings = {"compression": "zstd", "use_dictionary": False, "store_schema": False} | options
    pq.write_table(table, folder / "results.parquet", **settings)
    write_checksums(folder)


def test_another_form_of_parquet_is_refused(copy):
    table = pq.read_table(copy / "results.parquet")
    for options in ({"use_dictionary": True}, {"compression": "gzip"}):
        write_table(copy, table, **options)
        assert "an encoding that results files do not use" in text_of(copy)
    write_table(copy, table, store_schema=True)
    assert "other columns than a results file" in text_of(copy)
    write_table(copy, table.append_column("more", pa.array([1] * len(table))))
    assert "other columns than a results file" in text_of(copy)


def test_a_damaged_or_missing_file_is_found(copy, small_data):
    path = copy / "results.parquet"
    content = path.read_bytes()
    for damaged in (content[:-20], b"", content[:2_000] + b"\0" * 500 + content[2_500:]):
        path.write_bytes(damaged)
        write_checksums(copy)
        assert verify(copy, small_data).problems
    path.unlink()
    assert "the run is not complete" in text_of(copy)
    path.write_bytes(content)
    (copy / "checksums.json").unlink()
    assert "checksums.json: cannot be read" in text_of(copy)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"task": 1,', '"task": 2,', "is not the task list"),
        ('"sha256": "', '"sha256": "0', "field 'sha256'"),
        ('"task_id": "Syn', '"task_id": "syn', "field 'task_id'"),
        ('"hops": 2', '"hops": 3', "field 'labels'"),
    ],
)
def test_a_changed_task_list_is_found_even_with_a_new_digest(copy, small_data, old, new, message):
    replace_text(copy / "tasks.json", old, new)
    text = text_of(copy, small_data)
    assert "tasks.json, 'table': is not the task list of manifest.json" in text
    tasks = read_run(copy).tasks

    def change(manifest):
        for record in manifest["environments"]:
            record["tasks_sha256"] = task_list_sha256(tasks[record["slug"]])

    edit_manifest(copy, change)
    assert message in text_of(copy, small_data)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"seed": 5', '"seed": 6', "field 'actions': is"),
        ('"samples_per_task": 2', '"samples_per_task": 1', "42 rows; the run has 21"),
        ('"samples_per_task": 2', '"samples_per_task": 0', "should be greater than or equal to 1"),
        ('"exact_match": 1.0', '"exact_match": 2.0', "field 'reward_terms'"),
        ('"max_turns": 6', '"max_turns": 7', "field 'max_turns'"),
        ('"split": "test"', '"split": "train"', "field 'sha256'"),
        ('"split": "test"', '"splt": "test"', "splt"),
        ('"split": "test"', '"sandbox": "limits"', "sandbox = 'limits' is not allowed"),
        ('"${data}/hotpot.jsonl"', '"/etc/passwd"', "is not allowed"),
        ('"${data}/hotpot.jsonl"', '"${data}/../x"', "is not allowed"),
        ('"AgentR1/SyntheticTable-v0"', '"os:AgentR1/X-v0"', "is not allowed"),
        ('"slug": "rules"', '"slug": "../rules"', "'agents.1.slug': String should match"),
        ('"slug": "rules"', '"slug": "oracle"', "a slug is repeated"),
        ('"slug": "table"', '"slug": "gsm8k"', "42 rows; the run has 24"),
        ('"kind": "random"', '"kind": "oracle"', "field 'actions': is"),
        ('"format_version": 4', '"format_version": 3', "'format_version' is 3"),
        ('"num_tasks": 3', '"num_tasks": "3"', "is not in the canonical form"),
        ('"num_tasks": 3', '"num_tasks": 4', "field 'num_tasks': is wrong"),
        ('"num_tasks": 3', '"num_tasks": 0', "should be greater than or equal to 1"),
        ('"date": "', '"date": "2026-99-99', "agents.0.date': Invalid isoformat"),
        ('"left_out"', '"left_ou"', "left_ou"),
        ('"prices": null', '"prices": {"prompt": -5, "completion": 0}', "agents.0.prices.prompt"),
        ('"hotpot.jsonl"', '"hotpt.jsonl"', "field 'data'"),
        ('"num_tasks": 3', '"num_tasks": 3, "num_tasks": 3', "an object repeats a key"),
        ('"organisation": null', f'"organisation": "{"a" * 2_001}"', "at most 2000 characters"),
    ],
)
def test_a_changed_manifest_is_found(copy, small_data, old, new, message):
    replace_text(copy / "manifest.json", old, new)
    assert message in text_of(copy, small_data)


def test_files_that_are_not_part_of_a_run_are_found(copy):
    names = {"notes.txt", ".hidden", "Manifest.json", "results", "models", "work"}
    for name in names:
        (copy / name).mkdir() if name in ("models", "work") else (copy / name).write_text("x")
    assert set(verify(copy).problems) == {f"{name}: is not part of a run" for name in names}


def test_tables_are_compared_and_pages_are_not(copy, small_data):
    write_reports(copy, small_data)
    found = verify(copy, small_data)
    assert found.problems == []
    assert [text.partition(":")[0] for text in found.on_trust] == ["leaderboard.html"]
    replace_text(copy / "leaderboard.md", "100.0", "99.0", hide=False)
    (problem,) = verify(copy, small_data).problems
    assert problem.startswith("leaderboard.md: differs from the results")
    (copy / "work").write_text("no folder")
    assert verify(copy).problems == ["work: is not part of a run"]


def test_other_data_than_those_of_the_run_are_found(copy, small_data, tmp_path):
    data = shutil.copytree(small_data, tmp_path / "data")
    replace_text(data / "hotpot.jsonl", "Norway", "Sweden", hide=False)
    text = text_of(copy, data)
    assert "environment 'hotpotqa': manifest.json, field 'data': is" in text
    assert "environment 'hotpotqa': tasks.json, entry 1, field 'sha256'" in text


@pytest.mark.parametrize("names", [("agents",), ("agents", "environments")])
def test_an_empty_run_is_not_verified(copy, names):
    run = read_run(copy)
    manifest = dataclasses.replace(run.manifest, **{name: [] for name in names})
    tasks = run.tasks if len(names) == 1 else {}
    write_run(copy, Run(manifest=manifest, tasks=tasks, results={}))
    assert "nothing to verify" in text_of(copy)


SWAP = {"split": "test", "attack": {"attacker": "swap"}}
INJECTED = {"split": "test", "variant": "injected"}


@pytest.mark.parametrize(("attack", "attack_on", "kwargs", "message"), [
    ("edits", "hotpotqa", {"split": "test"}, "field 'attack': is 'edits', the arguments give None"),
    (None, None, SWAP, "field 'attack': is None, the arguments give 'edits'"),
    ("robustness", "multi-hop", INJECTED, "is 'robustness', the arguments give 'injection'"),
    ("edits", "table", SWAP, "'table' is not the same without an attack"),
    ("edits", "multi-hop", SWAP | {"hops": 1}, "'multi-hop' is not the same without an attack"),
    ("edits", None, SWAP, "one is given without the other"),
    ("edits", "multi-hop", {"attack": "dos"}, "is 'edits', the arguments give 'AgentDojo'"),
])  # fmt: skip
def test_a_false_attack_is_found(attack, attack_on, kwargs, message):
    plain, attacked = (
        EnvironmentRecord(
            slug=slug, id="AgentR1/SyntheticMultiHop-v0", kwargs={"split": "test"}, num_tasks=1,
            contamination="none",
        )
        for slug in ("multi-hop", "table")
    )  # fmt: skip
    attacked = dataclasses.replace(attacked, kwargs=kwargs, attack=attack, attack_on=attack_on)
    manifest = Manifest(
        format_version=FORMAT_VERSION, protocol=Protocol(), environments=[plain, attacked],
        agents=[], left_out=[],
    )  # fmt: skip
    assert [text for text in claims.check_names(manifest) if message in text]


def test_environments_that_a_run_lacks_stay_on_trust(copy, small_data, monkeypatch):
    run = read_run(copy)
    kept = [one for one in run.manifest.environments if one.slug != "table"]
    manifest = dataclasses.replace(run.manifest, environments=kept)
    tasks = {one.slug: run.tasks[one.slug] for one in kept}
    results = {cell: own for cell, own in run.results.items() if cell[0] != "table"}
    write_run(copy, Run(manifest=manifest, tasks=tasks, results=results))
    monkeypatch.setattr("agent_leaderboard.verify.verify.published", lambda: run.manifest)
    found = verify(copy, small_data, is_published=True)
    assert found.problems == []
    assert found.on_trust == ["that the run lacks table, which the board has"]


STATE = [{"role": "user", "content": "who ? " * 20}]
OPENS = '<tool_call>{"name": "search", "arguments": {"query": " '
"""One token of the embedded policy."""


def replayed(*attempts, messages=STATE, tool_format="hermes", metrics=None):
    """Attempts as a replay gives them: the same state before each action."""
    info = {"messages": messages, "tools": None, "metrics": metrics or {}}
    return ReplayedEpisode(
        entry=None, question="who ?", answers=(), attempts=attempts,
        tool_format=TOOL_FORMATS[tool_format],
        rounds=[
            [ReplayedStep("", 0.0, False, False, info | {"action": answer_of(action)})
             for action in ("", *actions)]
            for actions in attempts
        ],
    )  # fmt: skip


def answer_of(action):
    return {"kind": "answer", "answer": action} if action else {}


def record(kind="checkpoint", model="my-run", **settings):
    return AgentRecord(slug="a", name="a", kind=kind, model=model, settings=settings,
                       packages={})  # fmt: skip


WEIGHTS = {"model.safetensors": "0"}
TRAINED = dataclasses.replace(record(), train={"num_eval_tasks": 0}, weights_sha256=WEIGHTS)
"""A policy trained from the embedded one."""


@pytest.mark.parametrize("change", [
    {"train": {}}, {"weights_sha256": {}}, {"kind": "react"}, {"train": {"model": "another"}},
    {"train": None},
])  # fmt: skip
def test_costs_are_recounted_of_a_checkpoint_trained_from_the_embedded_policy_only(change):
    assert is_recounted(TRAINED)
    assert not is_recounted(dataclasses.replace(TRAINED, **change))


def test_a_trained_model_has_weights():
    for weights in (WEIGHTS, {}):
        agent = dataclasses.replace(TRAINED, weights_sha256=weights)
        found = [text for text in claims._check_agent(agent, {"e"}) if "field 'train'" in text]
        assert bool(found) == (not weights)


def result(*, attempts=0, success=False, **counts):
    counts = {"calls": 1, "prompt_tokens": 1, "completion_tokens": 1} | counts
    return EpisodeResult(
        environment="e", agent="a", task=0, sample=0, success=success, return_=0.0, error=None,
        stop_reason=StopReason.ANSWERED, money=None, seconds=None, actions=["x"], rewards=[0.0],
        reward_terms=[{}], errors=[None], metrics={}, attempts=[["x"]] * attempts, **counts,
    )  # fmt: skip


@pytest.mark.parametrize("share", [0.25, 0.9, 1.0, 1.1, 1_000])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_tokens_of_a_policy_trained_from_the_embedded_one_are_counted_again(name, share):
    """20 turns of one token and its end, in 20 equal states of 20 times "who ?"."""
    again = replayed([OPENS] * 20)
    renderer = claims._renderer()
    truth = {"prompt_tokens": 20 * renderer.count_tokens(STATE, None), "completion_tokens": 40}
    assert len(renderer.turn_ids(OPENS)) == 2
    one = result(calls=20, **truth | {name: int(share * truth[name])})
    # One token per call may be another: of 2 in a completion, but not of many in a prompt.
    is_close = share in (0.9, 1.0, 1.1) if name == "completion_tokens" else share == 1.0
    assert (not list(claims.check_tokens(one, TRAINED, again))) == is_close
    retried = result(calls=40, **{**truth, name: 2 * truth[name]})
    assert not list(claims.check_tokens(retried, TRAINED, again))


def test_tokens_of_an_unknown_model_have_lower_bounds():
    again = replayed(["word " * 64] * 2)  # 320 bytes of two turns; a state has 120
    bounds = {"prompt_tokens": 3, "completion_tokens": 16}  # bytes / 32, halved in prompts
    assert list(claims.check_tokens(result(calls=2, **bounds), record(), again)) == []
    for name, least in bounds.items():
        (problem,) = claims.check_tokens(
            result(calls=2, **bounds | {name: least - 1}), record(), again
        )
        assert f"field {name!r}: is {least - 1}; the text alone takes" in problem


def test_no_model_writes_more_tokens_than_its_settings_allow():
    agent = record(max_new_tokens=32)
    for num_tokens, is_possible in ((64, True), (65, False)):
        one = result(calls=2, prompt_tokens=9, completion_tokens=num_tokens)
        assert (not list(claims.check_usage(one, agent))) == is_possible
    one = result(calls=2, prompt_tokens=9, completion_tokens=2 * 512 + 1)
    assert list(claims.check_usage(one, record("react")))
    local = dataclasses.replace(record(), weights_sha256={"a.safetensors": "0"})
    for num_tokens, is_possible in ((2 * 32_768, True), (2 * 32_768 + 1, False)):
        one = result(calls=2, prompt_tokens=9, completion_tokens=num_tokens)
        assert (not list(claims.check_usage(one, local))) == is_possible


@pytest.mark.parametrize(
    ("kind", "kind_has_model"), [("heuristic", False), ("react", True), ("naive_rag", True)]
)
def test_only_an_agent_with_a_model_records_one(kind, kind_has_model):
    agent = dataclasses.replace(record(kind), made_by="someone", weights_sha256={"a": "0"})
    assert (claims._expected_record(agent).model is not None) == kind_has_model
    assert bool(claims._expected_record(agent).weights_sha256) == kind_has_model


# Strategies


LOST = {"error": "lost", "stop_reason": StopReason.POLICY_ERROR}


@pytest.mark.parametrize(
    ("samples", "attempts", "change", "is_possible"),
    [
        (3, 1, {}, False), (3, 2, {}, True), (3, 3, {}, False), (3, 1, LOST, True),
        (3, 3, LOST, False), (2, 1, {}, True), (2, 2, {}, False),
    ],
)  # fmt: skip
def test_there_are_as_many_attempts_as_the_settings_say(samples, attempts, change, is_possible):
    counts = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens"), 4)
    one = dataclasses.replace(result(attempts=attempts, **counts), **change)
    found = list(claims.check_usage(one, record("best_of_n", samples=samples)))
    assert (not found) == is_possible, found


def test_the_start_of_a_pattern_is_not_its_end_too():
    pattern = f"ab{claims._MARK}bc"
    assert [claims._matches(text, pattern) for text in ("abc", "abbc", "abxbc")] == [
        False, True, True,
    ]  # fmt: skip


def test_only_an_overflow_is_found_before_the_last_call():
    for reason in StopReason:
        counts = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens"), 1)
        one = dataclasses.replace(result(**counts), actions=["x", "y"], stop_reason=reason)
        found = list(claims.check_usage(one, record("react")))
        assert (not found) == (reason is StopReason.CONTEXT_OVERFLOW), reason


@pytest.mark.parametrize(
    ("answers", "is_fair"),
    [
        (["a", "b", "a"], True),
        (["b", "a", "a"], False),
        (["", "a", "b"], False),
        (["a", "b", "c"], True),  # of equal votes the first counts; its place is not recorded
        (["", "", ""], True),
    ],
)
def test_best_of_n_counts_the_attempt_with_the_most_frequent_answer(answers, is_fair):
    again = replayed(*([answer] for answer in answers))
    agent = record("best_of_n", samples=3)
    assert (not list(claims.check_strategy(result(attempts=2), agent, again))) == is_fair


def test_reflexion_stops_at_its_first_success_and_not_before_its_last_trial():
    agent = record("reflexion", trials=3)
    tried = result(attempts=1, success=True, calls=2, prompt_tokens=2, completion_tokens=2)
    assert list(claims.check_strategy(tried, agent, replayed(["x"], ["x"]))) == []
    assert list(claims.check_strategy(tried, agent, replayed(["x"], ["x"], metrics={"success": 1})))
    again = replayed(["x"], ["x"])
    again.rounds[1][-1].info["metrics"] = {"success": 1}  # only its end counts
    assert list(claims.check_strategy(tried, agent, again))
    assert list(claims.check_usage(tried, agent)) == []
    gave_up = dataclasses.replace(tried, success=False)
    (problem,) = claims.check_usage(gave_up, agent)
    assert "field 'attempts': are 1; there are 3 in all" in problem


@pytest.mark.parametrize("tool_format", ["hermes", "tags", "json", "react"])
@pytest.mark.parametrize(("kind", "most"), [("naive_rag", 1), ("iterative_rag", 2)])
def test_search_strategies_make_their_own_searches_only(tool_format, kind, most):
    write, question = TOOL_FORMATS[tool_format], 'Who said "no"?\n'
    search = [write.write_call("search", {"query": q})
              for q in (question, f'a "guess" {question.strip()}')]  # fmt: skip
    answer = write.write_answer('any "text"')
    agent = record(kind, iterations=2) if most == 2 else record(kind)
    states = [[{"role": "user", "content": question}]]
    states += [[*states[0], {"role": "assistant", "content": ""}]] * 3
    for actions, is_fair in (
        ([*search[:most], answer], True),
        ([*search[:most], answer, answer], True),  # after an invalid answer
        ([answer], False),
        ([search[1], answer], False),
        ([*search[:most], search[0], answer], False),
        ([write.write_call("search", {"query": "A gold passage"}), answer], False),
        ([search[0], write.write_call("search", {"query": "A gold passage"}), answer], False),
        ([write.write_call("search", {"query": "gold passage"}), answer], False),
    ):
        again = replayed(actions, tool_format=tool_format)
        steps = [dataclasses.replace(step, info=step.info | {"messages": own})
                 for step, own in zip(again.rounds[0], states, strict=False)]  # fmt: skip
        again = dataclasses.replace(again, rounds=[steps])
        found = list(claims.check_strategy(result(calls=3), agent, again))
        assert (found == []) == is_fair, (actions, found)
