"""Runs as logs of inspect_ai and back, with the real package; skipped where it is missing."""

import gc
import json
import warnings
from dataclasses import asdict

import pytest

from agent_envs.errors import ConfigurationError, DataError
from agent_leaderboard.inspect_logs import convert
from agent_leaderboard.records.run_folder import RunFolder
from agent_leaderboard.report.summary import is_verifiable, read_run, summarise
from agent_leaderboard.report.tables import make_csv, make_markdown
from agent_trainers.trajectory import StopReason
from tests.agent_leaderboard.played_runs import LICENSED, PUBLIC, make_run

pytest.importorskip("inspect_ai", reason="the extra inspect is not installed")


@pytest.fixture(scope="module")
def logs(tmp_path_factory, run_folder):
    folder = tmp_path_factory.mktemp("logs")
    convert.export(run_folder, folder)
    return folder


def read(path):
    from inspect_ai.log import read_eval_log

    return read_eval_log(str(path), resolve_attachments=True)


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "checksums.json"
    }


def test_a_run_comes_back_from_its_logs_byte_for_byte(run_folder, logs, tmp_path):
    convert.import_logs([logs], tmp_path / "back")
    assert files(tmp_path / "back") == files(run_folder)
    folder = RunFolder(tmp_path / "back")
    assert set(folder.read_checksums()) == set(folder.expected_files(folder.read_manifest()))


def test_faults_samples_and_missing_seconds_come_back_too(tmp_path, data_folder):
    run = make_run(
        tmp_path / "run", data_folder, samples_per_task=2, with_seconds=False,
        faults=[(PUBLIC, "some", 4)],
    )  # fmt: skip
    convert.export(run, tmp_path / "logs")
    convert.import_logs([tmp_path / "logs"], tmp_path / "back")
    assert files(tmp_path / "back") == files(run)


def test_the_viewer_gets_the_conversation_with_tool_calls_and_scores(logs):
    log = read(logs / f"{PUBLIC}_oracle.eval")
    sample = log.samples[0]
    assert [message.role for message in sample.messages[:2]] == ["system", "user"]
    call, result = sample.messages[2:4]
    assert call.tool_calls[0].function == "search"
    assert call.tool_calls[0].id == result.tool_call_id
    assert result.role == "tool"
    assert result.text
    assert call.metadata["reward_terms"]["new_gold_passage"] > 0
    assert sample.scores["success"].value == 1
    assert sample.target
    assert log.results.scores[0].metrics["mean"].value == 1.0


def test_a_failure_says_why_and_a_model_what_it_cost(logs):
    sample = read(logs / f"{PUBLIC}_some.eval").samples[5]
    assert sample.scores["success"].value == 0
    assert "the task was not solved" in sample.scores["success"].explanation
    (usage,) = sample.model_usage.values()
    assert (usage.input_tokens, usage.output_tokens) == (200, 20)


def test_licensed_text_is_in_a_log_only_with_the_data(run_folder, logs, data_folder, tmp_path):
    name = f"{LICENSED}_some.eval"
    question = "In which country was the director of Red Harbor born?"
    without = read(logs / name).samples[0]
    assert question not in without.model_dump_json()
    assert "is not published" in without.messages[0].text
    convert.export(run_folder, tmp_path, data_folder)
    assert question in read(tmp_path / name).samples[0].messages[1].text


def test_hostile_text_survives_the_way_there(logs):
    sample = read(logs / f"{PUBLIC}_hostile.eval").samples[0]
    assert "</script>" in sample.messages[2].text
    assert "\\ud800" in sample.messages[2].text


def test_a_score_that_was_edited_is_refused(logs, tmp_path):
    from inspect_ai.log import write_eval_log

    log = read(logs / f"{PUBLIC}_some.eval")
    log.samples[5].scores["success"].value = 1
    write_eval_log(log, str(tmp_path / "edited.json"))
    with pytest.raises(DataError, match=r"edited\.json: sample .* the score is 1, but the run"):
        convert.import_logs([tmp_path / "edited.json"], tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda record: record["agent"].update(slug="../../evil"), "is no plain name"),
        (lambda record: record.update(position=["a", 0]), "field 'position.0'"),
        (lambda record: record.pop("tasks"), "field 'tasks'"),
        (lambda record: record["environment"].update(num_tasks="many"), "num_tasks"),
    ],
)
def test_a_record_that_was_tampered_with_is_refused(logs, tmp_path, change, complaint):
    from inspect_ai.log import write_eval_log

    log = read(logs / f"{PUBLIC}_some.eval")
    record = json.loads(log.eval.metadata["agent_r1"])
    change(record)
    log.eval.metadata["agent_r1"] = json.dumps(record)
    write_eval_log(log, str(tmp_path / "log.json"))
    with pytest.raises(DataError, match=complaint):
        convert.import_logs([tmp_path / "log.json"], tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_logs_of_two_protocols_do_not_share_a_table(logs, tmp_path, data_folder):
    other = make_run(tmp_path / "run", data_folder, samples_per_task=2)
    convert.export(other, tmp_path / "logs")
    paths = [logs / f"{PUBLIC}_some.eval", tmp_path / "logs" / f"{PUBLIC}_oracle.eval"]
    with pytest.raises(DataError, match="protocol is not as in the logs before it"):
        convert.import_logs(paths, tmp_path / "back")


def test_what_is_no_log_is_refused(logs, tmp_path):
    (tmp_path / "no.eval").write_text("nothing")
    (tmp_path / "no.json").write_text("{}")
    for name in ("no.eval", "no.json", "missing.eval"):
        with pytest.raises(DataError, match=f"{name}: is no log of inspect_ai"):
            convert.import_logs([tmp_path / name], tmp_path / "back")
    with pytest.raises(ConfigurationError, match="is not empty"):
        convert.import_logs([logs], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="no log to read"):
        convert.import_logs([tmp_path / "empty"], tmp_path / "back")


def test_the_same_cell_twice_is_refused(logs, tmp_path):
    twice = [logs / f"{PUBLIC}_some.eval"] * 2
    with pytest.raises(DataError, match="another log holds some on multi-hop already"):
        convert.import_logs(twice, tmp_path / "back")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A log of an evaluation that inspect_ai ran itself, on a mock model."""
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    answers = ["Oslo", "Oslo", "no idea", "Paris", "Paris", "Paris"]
    model = get_model(
        "mockllm/model",
        # With usage: without it, a tokenizer would be fetched to count.
        custom_outputs=[
            ModelOutput.from_content("mockllm/model", text).model_copy(
                update={"usage": ModelUsage(input_tokens=9, output_tokens=2, total_tokens=11)}
            )
            for text in answers
        ],
    )
    task = inspect_ai.Task(
        dataset=[
            Sample(id="norway", input="Capital of Norway?", target="Oslo"),
            Sample(id="france", input="Capital of France?", target="Paris"),
        ],
        solver=generate(),
        scorer=match(),
        name="capitals",
        epochs=3,
    )
    folder = tmp_path_factory.mktemp("foreign")
    with warnings.catch_warnings():
        # inspect_ai leaves streams open, and calls what its own dependencies deprecate.
        warnings.simplefilter("ignore")
        (log,) = inspect_ai.eval(
            task, model=model, log_dir=str(folder), display="none", max_samples=1, max_connections=1
        )
        gc.collect()
    assert log.status == "success", log.error
    return folder


def test_a_log_that_inspect_wrote_becomes_a_run_that_is_marked(foreign, tmp_path):
    convert.import_logs([foreign], tmp_path / "back")
    board = summarise(read_run(tmp_path / "back"))
    (cell,) = board.cells.values()
    assert (cell.environment, cell.agent) == ("capitals", "mockllm-model")
    lines = board.run.lines[cell.environment, cell.agent]
    assert [(line.task_id, line.sample) for line in lines] == [
        ("france", 0), ("france", 1), ("france", 2), ("norway", 0), ("norway", 1), ("norway", 2),
    ]  # fmt: skip
    answers = {"france": "Paris", "norway": "Oslo"}
    assert all(line.success == (answers[line.task_id] in line.actions[-1]) for line in lines)
    assert cell.success.count == 2
    assert {line.stop_reason for line in lines} == {StopReason.ANSWERED}
    (environment,) = board.run.manifest.environments
    assert environment.id == "inspect_ai:capitals"
    assert not is_verifiable(environment)
    assert "`capitals` (not verifiable)" in make_markdown(board)
    assert ",inspect_ai:capitals,False," in make_csv(board)


def test_errors_and_limits_of_a_foreign_log_are_kept(foreign, tmp_path):
    from inspect_ai.log import EvalError, EvalSampleLimit, write_eval_log

    log = read(next(foreign.glob("*.eval")))
    error = EvalError(message="server is down", traceback="", traceback_ansi="")
    log.samples[0].error = error
    log.samples[1].limit = EvalSampleLimit(type="token", limit=100)
    log.samples[1].scores["match"].value = "I"
    write_eval_log(log, str(tmp_path / "log.eval"))
    convert.import_logs([tmp_path / "log.eval"], tmp_path / "back")
    run = read_run(tmp_path / "back")
    (lines,) = run.lines.values()
    assert [line.error for line in lines if line.error] == ["server is down"]
    assert [line.stop_reason for line in lines if not line.success and not line.error].count(
        StopReason.TOKEN_LIMIT
    ) == 1
    assert all(asdict(line)["usage"]["money"] is None for line in lines)


def test_a_foreign_sample_without_a_turn_of_the_model_is_kept(foreign, tmp_path):
    from inspect_ai.log import write_eval_log

    log = read(next(foreign.glob("*.eval")))
    log.samples[0].messages = []
    write_eval_log(log, str(tmp_path / "log.eval"))
    convert.import_logs([tmp_path / "log.eval"], tmp_path / "back")
    (lines,) = read_run(tmp_path / "back").lines.values()
    assert [line.return_ for line in lines if not line.actions] == [0.0]
