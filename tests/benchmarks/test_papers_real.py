"""The papers' comparison on real questions, with a handful of rows and a tiny random model."""

import itertools
import json
import os
import random
import shlex
import signal
from pathlib import Path

import pytest

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.scoring import wilson_interval
from agent_trainers.checkpointing.interruption import Interrupted
from agent_trainers.cli import evaluate, sft, train
from benchmarks.papers_real import __main__ as papers_real
from benchmarks.papers_real import naive_rag
from benchmarks.papers_real.cells import Commands, PapersRealArguments, wanted_cells
from benchmarks.papers_real.naive_rag import clean_answer, pick_examples
from benchmarks.papers_real.questions import TEST_SETS, QuestionArguments, prepare_questions
from benchmarks.papers_real.report import write_report
from benchmarks.papers_real.work import CommandFailedError, Runner
from tests.agent_trainers.real_models import save_model

WORDS = "amber birch cedar delta ember fjord grove haven inlet jetty".split()


def hotpotqa_row(number, answer="Paris"):
    names = [f"{WORDS[number % 10].title()} {number}", f"Town {number}"]
    pages = [[names[0], [f"{names[0]} lies in {names[1]}.", " More words follow here."]],
             [names[1], [f"{names[1]} belongs to {answer}."]],
             [f"Other {number}", ["Nothing of use."]]]  # fmt: skip
    return {
        "id": f"q{number}", "question": f"Where does {names[0]} belong?", "answer": answer,
        "type": "bridge", "level": "easy",
        "context": pages, "supporting_facts": [[names[0], 0], [names[1], 0]],
    }  # fmt: skip


def two_wiki_row(number):
    return hotpotqa_row(number) | {"evidences": [["a", "b", "c"]]}


def musique_row(number):
    row = hotpotqa_row(number)
    paragraphs = [
        {"title": title, "paragraph_text": "".join(lines), "is_supporting": i < 2}
        for i, (title, lines) in enumerate(row["context"])
    ]
    return {
        "id": f"2hop__{number}", "question": row["question"], "answer": "Paris",
        "answer_aliases": ["City of Paris"], "answerable": True, "paragraphs": paragraphs,
    }  # fmt: skip


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files of rows, as arguments of `QuestionArguments`."""
    folder = tmp_path_factory.mktemp("rows")
    two_wiki = write_rows(folder / "two_wiki.jsonl", map(two_wiki_row, range(100, 130)))
    return {
        "hotpotqa_train": [write_rows(folder / "train.jsonl", map(hotpotqa_row, range(20)))],
        "hotpotqa_test": [write_rows(folder / "test.jsonl", map(hotpotqa_row, range(15, 30)))],
        "two_wiki_train": [two_wiki],
        "two_wiki_test": [two_wiki],
        "musique_test": [write_rows(folder / "musique.jsonl", map(musique_row, range(200, 210)))],
    }


def questions_of(folder, name):
    return {row["question"] for row in read_rows(folder / f"{name}.jsonl")}


# Questions


def test_no_tested_question_is_trained_on(sources, tmp_path):
    facts = prepare_questions(QuestionArguments(**sources, num_test=50), tmp_path)
    tested = {name: questions_of(tmp_path, name) for name in ("hotpotqa", "two_wiki", "musique")}
    trained = questions_of(tmp_path, "train")
    assert not trained & set().union(*tested.values())
    assert {name: len(questions) for name, questions in tested.items()} == facts["test"]
    # 5 of the 20 training rows of HotpotQA are tested, so they are not trained on
    assert facts["train"]["hotpotqa"] == 15
    assert facts["test"]["hotpotqa"] == 15
    # the one file of 2Wiki is split: none is lost, none is on both sides
    assert facts["train"]["two_wiki"] + facts["test"]["two_wiki"] == 30
    assert min(facts["train"]["two_wiki"], facts["test"]["two_wiki"]) > 3


def test_what_is_drawn_depends_on_the_questions_and_not_on_their_order(sources, tmp_path):
    rows = read_rows(Path(sources["two_wiki_train"][0]))
    random.Random(1).shuffle(rows)
    shuffled = [write_rows(tmp_path / "shuffled.jsonl", rows)]
    drawn = []
    for number, files in enumerate((sources["two_wiki_train"], shuffled)):
        given = sources | {"two_wiki_train": files, "two_wiki_test": files}
        prepare_questions(QuestionArguments(**given, num_test=4), tmp_path / str(number))
        drawn.append(questions_of(tmp_path / str(number), "two_wiki"))
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4


def test_all_passages_of_all_rows_are_searched_each_cut_to_its_first_words(sources, tmp_path):
    facts = prepare_questions(QuestionArguments(**sources, num_test=3, passage_words=4), tmp_path)
    passages = read_rows(tmp_path / "passages.jsonl")
    assert {p["title"] for p in passages} >= {"Other 16", "Other 125", "Other 205", "Town 1"}
    assert all(len(p["text"].split()) <= 4 for p in passages)
    # "Town N belongs to | Paris." is cut before the answer
    assert facts["answer_is_kept"] == {"hotpotqa": 0.0, "two_wiki": 0.0, "musique": 0.0}


def test_a_file_that_cannot_be_read_is_named_with_its_option(sources, tmp_path):
    options = QuestionArguments(**(sources | {"musique_test": ["none.jsonl"]}))
    with pytest.raises(DataError, match=r"--musique_test: none\.jsonl: cannot be read"):
        prepare_questions(options, tmp_path)


# Cells


def runner_in(folder):
    return Runner(Commands(PapersRealArguments(model="m", work=str(folder))))


def test_the_first_seed_of_all_rows_comes_before_the_second_of_any_and_the_warm_start_first():
    cells = wanted_cells(["GRPO", "PPO"], [3, 5])
    assert [cell.folder for cell in cells] == ["warm-start", "grpo-3", "ppo-3", "grpo-5", "ppo-5"]


def test_training_goes_on_until_the_budget_of_environment_steps_is_met(tmp_path):
    options = PapersRealArguments(model="m", budget=1000, batch_size=10, work=str(tmp_path))
    commands = Commands(options)
    assert commands.next_length([]) == 25  # 1000 / (10 episodes of at most 4 steps)
    first = {"max_steps": 25, "environment_steps": 500}
    assert commands.next_length([first]) == 50  # 20 steps a batch: 25 batches are left
    assert commands.next_length([first, {"max_steps": 50, "environment_steps": 1001}]) is None


def test_a_second_call_in_the_same_folder_is_refused(tmp_path):
    with (
        runner_in(tmp_path).hold(),
        pytest.raises(ConfigurationError, match="another call works there"),
        runner_in(tmp_path).hold(),
    ):
        pass


def test_a_command_that_outlives_a_killed_call_keeps_others_out(tmp_path):
    runner = runner_in(tmp_path)
    leave_a_process = (
        "import subprocess, pathlib, sys\n"
        "left = subprocess.Popen(['sleep', '60'], close_fds=False)\n"
        "pathlib.Path(sys.argv[1]).write_text(str(left.pid))\n"
    )
    with runner.hold():
        runner._run(["python", "-c", leave_a_process, str(tmp_path / "pid")], tmp_path)
    # our own hold is over, as that of a killed call is
    with pytest.raises(ConfigurationError, match="a killed one left"), runner.hold():
        pass
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


# Naive RAG


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("\nThe answer is: Paris.\nIt is in France.", "Paris"),
        ('Answer: "Paris"', "Paris"),
        ("<answer>Paris</answer>", "Paris"),
        ("", "unknown"),
    ],
)
def test_the_answer_is_taken_out_of_what_a_model_wrote(written, answer):
    assert clean_answer(written) == answer


def test_examples_are_passages_that_hold_their_answers():
    rows = [
        {"question": "q1", "answer": "Paris", "context": [["A", ["no"]], ["B", ["in Paris"]]]},
        {"question": "q2", "answer": "yes", "context": [["C", ["no"]]]},
        {"question": "q3", "answer": "Rome", "context": [["D", ["Rome"]]]},
    ]
    examples = pick_examples(rows, 2)
    assert [(e.question, e.passages[0].title) for e in examples] == [("q3", "D"), ("q1", "B")]


# Report


def result(row, seed, exact_match, curve=()):
    scores = {
        "exact_match": exact_match, "f1": exact_match, "gold_passage_recall": exact_match,
        "num_turns": [3.0] * len(exact_match), "num_tokens": [300.0] * len(exact_match),
    }  # fmt: skip
    return {
        "row": row, "seed": seed, "scores": dict.fromkeys(TEST_SETS, scores),
        "environment_steps": curve[-1]["environment_steps"] if curve else 0, "curve": curve,
        "form": None, "commands": [{"command": "agent-r1-eval --x", "seconds": 1}], "seconds": 60,
    }  # fmt: skip


FACTS = {
    "command": "python -m benchmarks.papers_real", "date": "2026-01-01", "hours": 1.0,
    "budget": 100, "passage_words": 40, "versions": {"python": "3.11"}, "model": "m",
    "questions": {
        "train": {"hotpotqa": 5, "two_wiki": 5}, "passages": 1000,
        "test": {"hotpotqa": 4, "two_wiki": 4, "musique": 4},
        "answer_is_kept": {"hotpotqa": 0.9, "two_wiki": 0.8, "musique": 0.7},
    },
}  # fmt: skip


def test_a_row_shows_the_sets_that_it_was_tested_on_so_far(tmp_path):
    untested = result("PPO", 1, [1.0, 1.0, 1.0, 1.0])
    untested["scores"] = {"hotpotqa": untested["scores"]["hotpotqa"]}
    warm_start = result("warm start", 1, [0.0, 0.0, 1.0, 1.0])
    write_report(tmp_path, {"warm start": {1: warm_start}, "PPO": {1: untested}}, FACTS)
    text = (tmp_path / "papers_real.md").read_text()
    shown = "100.0 [51.0, 100.0]"  # 1 / (1 + z**2 / 4) = 0.510
    assert f"| PPO | 1 | {shown} | {shown} | not run | not run | not run | not run |" in text
    assert "- PPO: better on 2 questions, worse on 0 (p = 0.5)" in text


def test_the_table_says_what_was_not_run_and_sets_rows_beside_the_warm_start(tmp_path):
    curve = [{"environment_steps": 100, "f1": 0.1}]
    results = {
        "warm start": {1: result("warm start", 1, [1.0, 0.0, 0.0, 0.0])},
        "GRPO": {s: result("GRPO", s, [1.0, 1.0, 0.0, 0.0], curve) for s in (1, 2)},
    }
    write_report(tmp_path, results, FACTS)
    text = (tmp_path / "papers_real.md").read_text()
    low, high = (100 * bound for bound in wilson_interval(0.5, 4))
    assert f"| GRPO | 2 | 50.0 [{low:.1f}, {high:.1f}] |" in text
    assert "| PPO | 0 | not run | not run |" in text
    # a question of each set is gained: 3 gained, none lost, p = 2 / 2**3
    assert "- GRPO: better on 3 questions, worse on 0 (p = 0.25)" in text
    assert (tmp_path / "papers_real.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "papers_real.json").read_text())["rows"]
    assert [row["row"] for row in rows if row["seeds"]] == ["warm start", "GRPO"]


# The command


@pytest.fixture
def in_process(monkeypatch):
    """Run the commands here: a process of its own for each would import torch anew."""
    ran = []
    mains = {
        "agent-r1-sft": sft.run, "agent-r1-train": train.run, "agent-r1-eval": evaluate.run,
        "python": lambda arguments: naive_rag.run(Path(arguments[-1])),
    }  # fmt: skip

    def run(self, command, folder):
        ran.append((command[0], folder.name))
        mains[command[0]](command[1:])
        write_json(folder / "commands.json", [{"command": shlex.join(command), "seconds": 1.0}])

    monkeypatch.setattr(Runner, "_run", run)
    return ran


def test_the_command_trains_tests_and_goes_on_where_it_was_stopped(
    sources, in_process, monkeypatch, tmp_path
):
    model = save_model(tmp_path / "model", "qwen2_5")
    files = itertools.chain.from_iterable((f"--{n}", *paths) for n, paths in sources.items())
    arguments = [
        *files, "--model", model, "--seeds", "1", "--budget", "8", "--batch_size", "4",
        "--num_demonstrations", "2", "--num_tried", "1", "--num_test", "1",
        "--max_completion_length", "4",
        "--warm_start_options", "--max_length 4000", "--train_options", "--num_generations 2",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    rows = ["--rows", "naive RAG", "warm start", "RLOO"]

    def stop(command):
        raise Interrupted(15)

    with monkeypatch.context() as patch:  # stopped when it is about to test what was trained
        whole = Commands.test
        patch.setattr(
            Commands, "test", lambda self, model, name, path: (
                stop(name) if (path.parent.name, name) == ("rloo-1", "musique")
                else whole(self, model, name, path)
            ),
        )  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            papers_real.main([*arguments, *rows])
    assert stopped.value.code == 143
    assert (
        "did best on training questions: 1 passages, 2 examples, brief"
        in (tmp_path / "out" / "papers_real.md").read_text()
    )
    assert "| warm start | 1 | 0.0 [" in (tmp_path / "out" / "papers_real.md").read_text()
    assert ("agent-r1-train", "rloo-1") in in_process

    in_process.clear()
    papers_real.main([*arguments, *rows])
    assert in_process == [("agent-r1-eval", "rloo-1")]
    assert "| RLOO | 1 | 0.0 [" in (tmp_path / "out" / "papers_real.md").read_text()
    trained = json.loads((tmp_path / "work" / "rloo-1" / "result.json").read_text())
    assert trained["environment_steps"] >= 8
    assert [point["environment_steps"] for point in trained["curve"]][-1] >= 8
    with pytest.raises(SystemExit, match=r"other settings.*batch_size: 4 -> 8"):
        papers_real.main([*arguments, *rows, "--batch_size", "8"])


def test_a_command_that_fails_is_named_with_the_end_of_its_log(tmp_path):
    with pytest.raises(CommandFailedError, match=r"(?s)ended with 3; .*log\.txt ends:.*too bad"):
        runner_in(tmp_path)._run(["python", "-c", "print('too bad'); exit(3)"], tmp_path)
    assert not (tmp_path / "commands.json").exists()


def test_a_request_to_stop_is_handed_on_and_the_command_may_end_in_peace(tmp_path):
    command = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(Interrupted):
        runner_in(tmp_path)._run(["python", "-c", command], tmp_path)
    assert "saved" in (tmp_path / "log.txt").read_text()


def test_nothing_is_trained_from_a_warm_start_that_failed(sources, monkeypatch, tmp_path, capsys):
    ran = []

    def fail(self, command, folder):
        ran.append(command[0])
        raise CommandFailedError("agent-r1-sft ended with 1")

    monkeypatch.setattr(Runner, "_run", fail)
    files = itertools.chain.from_iterable((f"--{n}", *paths) for n, paths in sources.items())
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"failed: warm-start; see above"):
        papers_real.main([*files, *places, "--model", "m", "--rows", "GRPO", "PPO"])
    assert ran == ["agent-r1-sft"]
    assert "agent-r1-sft ended with 1" in capsys.readouterr().err


def test_a_row_that_does_not_exist_gets_those_that_do():
    with pytest.raises(SystemExit, match=r"no 'GRPP'. Rows: base tool call, naive RAG"):
        papers_real.main(["--rows", "GRPP"])
