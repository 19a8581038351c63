"""Runs as logs of inspect_ai and back, with the real package; skipped where it is missing."""

import json

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.inspect_logs import export, import_logs
from agent_leaderboard.records.results import FILES, read_run
from tests.agent_leaderboard.runs import LICENSED, PUBLIC, make_run

pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")


@pytest.fixture(scope="module")
def logs(tmp_path_factory, run_folder):
    folder = tmp_path_factory.mktemp("logs")
    export(run_folder, folder)
    return folder


def read(path):
    from inspect_ai.log import read_eval_log

    return read_eval_log(str(path), resolve_attachments=True)


def rewrite(path, change, target):
    from inspect_ai.log import write_eval_log

    log = read(path)
    change(log)
    write_eval_log(log, str(target))
    return target


def test_a_run_comes_back_from_its_logs_unchanged(run_folder, logs, tmp_path, data_folder):
    import_logs([logs], tmp_path / "back")
    for name in FILES:
        assert (tmp_path / "back" / name).read_bytes() == (run_folder / name).read_bytes()
    other = make_run(tmp_path / "run", data_folder, samples_per_task=2, with_seconds=False,
                     faults=[(PUBLIC, "some", 4)])  # fmt: skip
    export(other, tmp_path / "logs")
    import_logs([tmp_path / "logs"], tmp_path / "again")
    assert read_run(tmp_path / "again") == read_run(other)


def test_the_viewer_gets_conversation_tool_calls_scores_and_costs(logs):
    log = read(logs / f"{PUBLIC}_oracle.eval")
    sample = log.samples[0]
    assert [message.role for message in sample.messages[:2]] == ["system", "user"]
    call, result = sample.messages[2:4]
    assert call.tool_calls[0].function == "search"
    assert call.tool_calls[0].id == result.tool_call_id
    assert (result.role, bool(result.text)) == ("tool", True)
    assert call.metadata["reward_terms"]["new_gold_passage"] > 0
    assert sample.scores["success"].value == 1
    assert sample.target
    assert log.results.scores[0].metrics["mean"].value == 1.0
    failed = read(logs / f"{PUBLIC}_some.eval").samples[5]
    assert failed.scores["success"].value == 0
    assert "the task was not solved" in failed.scores["success"].explanation
    (usage,) = failed.model_usage.values()
    assert (usage.input_tokens, usage.output_tokens) == (200, 20)
    hostile = read(logs / f"{PUBLIC}_hostile.eval").samples[0].messages[2].text
    assert "</script>" in hostile
    assert "\\ud800" in hostile


def test_licensed_text_is_in_a_log_only_with_the_data(run_folder, logs, data_folder, tmp_path):
    name = f"{LICENSED}_some.eval"
    question = "In which country was the director of Red Harbor born?"
    without = read(logs / name).samples[0]
    assert question not in without.model_dump_json()
    assert "is not published" in without.messages[0].text
    export(run_folder, tmp_path, data_folder)
    assert question in read(tmp_path / name).samples[0].messages[1].text


def edit_score(log):
    log.samples[5].scores["success"].value = 1


def edit_record(**changes):
    def change(log):
        record = json.loads(log.eval.metadata["agent_r1"])
        for name, value in changes.items():
            if value is None:
                del record[name]
            else:
                record["manifest"]["agents"][0][name] = value
        log.eval.metadata["agent_r1"] = json.dumps(record)

    return change


def forget(log):
    log.eval.metadata = {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_score, "the score is 1, but the run has success False"),
        (edit_record(slug="../../evil"), "is not a slug"),
        (edit_record(tasks=None), "field 'tasks'"),
        (forget, "was not written by `agent-r1-bench to-inspect`"),
    ],
)
def test_a_log_that_was_edited_is_refused(logs, tmp_path, change, message):
    path = rewrite(logs / f"{PUBLIC}_some.eval", change, tmp_path / "edited.json")
    with pytest.raises(DataError, match=message):
        import_logs([path], tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_logs_of_two_runs_repeated_and_missing_logs_are_refused(logs, tmp_path, data_folder):
    other = make_run(tmp_path / "run", data_folder, samples_per_task=2)
    export(other, tmp_path / "logs")
    first = logs / f"{PUBLIC}_some.eval"
    for paths, message in (
        ([first, tmp_path / "logs" / f"{PUBLIC}_oracle.eval"], "is a log of another run"),
        ([first, first], "another log has some on multi-hop"),
        ([first], "are missing"),
    ):
        with pytest.raises(DataError, match=message):
            import_logs(paths, tmp_path / "back")


def test_other_files_are_refused(logs, tmp_path):
    (tmp_path / "no.eval").write_text("nothing")
    (tmp_path / "no.json").write_text("{}")
    for name in ("no.eval", "no.json", "missing.eval"):
        with pytest.raises(DataError, match=f"{name}: is not a log of inspect_ai"):
            import_logs([tmp_path / name], tmp_path / "back")
    with pytest.raises(ConfigurationError, match="is not empty"):
        import_logs([logs], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="There is no log"):
        import_logs([tmp_path / "empty"], tmp_path / "back")
