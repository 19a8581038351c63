"""The comparison on real questions, with a handful of rows and a tiny random model."""

import dataclasses
import itertools
import json
import shlex
from pathlib import Path

import pytest

from agent_envs.data.files import write_json
from agent_envs.errors import ConfigurationError
from agent_trainers.cli import evaluate, sft, train
from agent_trainers.trajectory import load_trajectories, save_trajectories
from benchmarks.grid import CommandFailedError, Grid
from benchmarks.papers_real import __main__ as papers_real
from benchmarks.papers_real import naive_rag
from benchmarks.papers_real.cells import CellRunner, PapersRealArguments
from benchmarks.papers_real.questions import QuestionArguments, prepare_questions
from benchmarks.papers_real.report import write_report
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


def questions_of(folder, name):
    return {row["question"] for row in read_rows(folder / f"{name}.jsonl")}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Files of rows, as arguments of `QuestionArguments`."""
    folder = tmp_path_factory.mktemp("rows")
    rows = (hotpotqa_row(number) | {"evidences": [["a", "b", "c"]]} for number in range(100, 130))
    two_wiki = write_rows(folder / "two_wiki.jsonl", rows)
    return {
        "hotpotqa_train": [write_rows(folder / "train.jsonl", map(hotpotqa_row, range(20)))],
        "hotpotqa_test": [write_rows(folder / "test.jsonl", map(hotpotqa_row, range(15, 30)))],
        "two_wiki_train": [two_wiki],
        "two_wiki_test": [two_wiki],
        "musique_test": [write_rows(folder / "musique.jsonl", map(musique_row, range(200, 210)))],
    }


def test_training_and_test_questions_are_disjoint_and_passages_are_cut(sources, tmp_path):
    options = QuestionArguments(**sources, num_test=50, passage_words=4)
    facts = prepare_questions(options, tmp_path)
    tested = {name: questions_of(tmp_path, name) for name in ("hotpotqa", "two_wiki", "musique")}
    assert not questions_of(tmp_path, "train") & set().union(*tested.values())
    assert {name: len(questions) for name, questions in tested.items()} == facts["test"]
    # 5 of the 20 training rows of HotpotQA are test rows as well
    assert (facts["train"]["hotpotqa"], facts["test"]["hotpotqa"]) == (15, 15)
    # the one file of 2Wiki is split
    assert facts["train"]["two_wiki"] + facts["test"]["two_wiki"] == 30
    assert min(facts["train"]["two_wiki"], facts["test"]["two_wiki"]) > 3
    passages = read_rows(tmp_path / "passages.jsonl")
    assert {p["title"] for p in passages} >= {"Other 16", "Other 125", "Other 205", "Town 1"}
    assert all(len(p["text"].split()) <= 4 for p in passages)


def test_training_continues_until_the_budget_of_environment_steps_is_spent(tmp_path):
    options = PapersRealArguments(
        model="m", budget=1000, batch_size=10, train_options="--num_generations 2"
    )
    runner = CellRunner(Grid(tmp_path), options)
    assert runner.next_max_steps([]) == 25  # 1000 / (10 episodes of at most 4 steps)
    first = {"max_steps": 25, "environment_steps": 500}
    assert runner.next_max_steps([first]) == 50  # 20 steps a batch: 25 batches remain
    assert runner.next_max_steps([first, {"max_steps": 50, "environment_steps": 1001}]) is None


@pytest.fixture
def in_process(monkeypatch):
    """Run the commands in this process, where torch is imported."""
    ran = []
    mains = {
        "agent-r1-sft": sft.run, "agent-r1-train": train.run, "agent-r1-eval": evaluate.run,
        "python": lambda arguments: naive_rag.run(Path(arguments[-2]), json.loads(arguments[-1])),
    }  # fmt: skip

    def command(self, command, folder):
        ran.append((command[0], folder.name))
        folder.mkdir(exist_ok=True)
        mains[command[0]](command[1:])
        write_json(folder / "commands.json", [{"command": shlex.join(command), "seconds": 1.0}])

    monkeypatch.setattr(Grid, "command", command)
    return ran


def test_the_command_trains_tests_and_resumes(sources, in_process, monkeypatch, tmp_path, capsys):
    model = save_model(tmp_path / "model", "qwen2_5")
    files = itertools.chain.from_iterable((f"--{n}", *paths) for n, paths in sources.items())
    arguments = [
        *files, "--model", model, "--seeds", "1", "--budget", "8", "--batch_size", "4",
        "--num_demonstrations", "2", "--num_tried", "1", "--num_test", "1", "--jobs", "1",
        "--max_completion_length", "4", "--rows", "naive RAG", "warm start", "RLOO",
        "--warm_start_options", "--max_length 4000", "--train_options", "--num_generations 2",
        "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out"),
    ]  # fmt: skip

    def fail(self, model, name, episodes):
        if (episodes.parent.name, name) == ("rloo-1", "musique"):
            raise CommandFailedError("agent-r1-eval exited with 1")
        test(self, model, name, episodes)
        if (episodes.parent.name, name) == ("rloo-1", "two_wiki"):
            (episode,) = load_trajectories(episodes)
            episode = dataclasses.replace(
                episode, stop_reason="environment_error", error="no server"
            )
            save_trajectories(episodes, [episode])

    def lack_memory(self, folder):
        raise CommandFailedError("naive_rag exited with 1")

    test = CellRunner._test
    with monkeypatch.context() as patch:
        patch.setattr(CellRunner, "_test", fail)
        patch.setattr(CellRunner, "_run_naive_rag", lack_memory)
        with pytest.raises(SystemExit):
            papers_real.main(arguments)
    said = capsys.readouterr().err
    assert "failed cells: naive-rag" in said
    assert "failed cells: rloo-1" in said
    text = (tmp_path / "out" / "papers_real.md").read_text()
    assert "| warm start | 1 | 0.0 [" in text
    assert "Not run: base tool call" in text
    assert "RLOO; GRPO, no loss mask" in text
    assert ("agent-r1-train", "rloo-1") in in_process

    # As if the command had been killed when the last round of training had just ended.
    rounds = tmp_path / "work" / "rloo-1" / "rounds.json"
    write_json(rounds, json.loads(rounds.read_text())[:-1])
    in_process.clear()
    with pytest.raises(SystemExit):
        papers_real.main(arguments)
    assert in_process == [("python", "naive-rag"), ("agent-r1-eval", "rloo-1")]
    assert "1 of 1 episodes failed because of errors outside the model" in capsys.readouterr().err
    assert "RLOO; GRPO, no loss mask" in (tmp_path / "out" / "papers_real.md").read_text()

    in_process.clear()
    papers_real.main(arguments)
    assert in_process == [("agent-r1-eval", "rloo-1")]
    assert not [*(tmp_path / "work").glob("*/model/checkpoint-*")]
    assert "| RLOO | 1 | 0.0 [" in (tmp_path / "out" / "papers_real.md").read_text()
    results = map(json.loads, (tmp_path / "work" / "results.jsonl").read_text().splitlines()[1::2])
    trained = next(r["result"] for r in results if r["key"] == "rloo-1")
    assert trained["environment_steps"] == trained["curve"][-1]["environment_steps"] >= 8

    # Elsewhere, the published results are kept, and a row without its warm start is refused.
    in_process.clear()
    papers_real.main([*arguments, "--work", str(tmp_path / "new")])
    assert not in_process
    with pytest.raises(SystemExit):
        papers_real.main([*arguments, "--work", str(tmp_path / "new"), "--rows", "PPO"])
    assert "Run another seed" in capsys.readouterr().err

    # Those of other settings are not replaced.
    other = ["--num_tried", "2", "--rows", "naive RAG", "--work", str(tmp_path / "other")]
    with pytest.raises(SystemExit):
        papers_real.main([*arguments, *other])
    assert "results of other settings (num_tried)" in capsys.readouterr().err
    assert not in_process


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gradient_accumulation_steps 4", "a batch has 128 episodes, but --batch_size is 32"),
        ("--num_processes 2", "a batch has 64 episodes"),
        ("--logging_steps 5", "which is logged"),
        ("--per_device_train_batch_size 16 --steps_per_generation 2", "one optimiser step"),
    ],
)
def test_training_options_that_hide_environment_steps_are_refused(options, words, tmp_path):
    model = save_model(tmp_path / "model", "qwen2_5")
    with pytest.raises(ConfigurationError, match=words):
        CellRunner(Grid(tmp_path), PapersRealArguments(model=model, train_options=options))


def test_a_set_without_questions_is_refused(sources, tmp_path):
    row = write_rows(tmp_path / "one.jsonl", [hotpotqa_row(1)])
    options = QuestionArguments(**{**sources, "hotpotqa_train": [row], "hotpotqa_test": [row]})
    with pytest.raises(ConfigurationError, match=r"no question is left|also a test question"):
        prepare_questions(options, tmp_path)


def test_differences_are_those_of_the_mean_of_the_sets(tmp_path):
    def result(*scores):
        metrics = ("exact_match", "f1", "gold_passage_recall", "num_turns", "num_tokens")
        by_set = dict(zip(("hotpotqa", "two_wiki", "musique"), scores, strict=True))
        return {
            "scores": {name: dict.fromkeys(metrics, values) for name, values in by_set.items()},
            "environment_steps": 8, "seconds": 1.0, "commands": [],
        }  # fmt: skip

    results = {
        "warm start": dict.fromkeys((1, 2), result([0.0] * 4, [0.0] * 2, [0.0] * 2)),
        "PPO": {
            1: result([1.0] * 4, [1.0, 0.0], [0.0] * 2),
            2: result([0.0] * 4, [1.0, 0.0], [0.0] * 2),
        },
        "GRPO": {1: result([0.0] * 4, [0.0] * 2, [1.0] * 2)},
    }
    facts = {
        "command": "", "date": "", "hours": 0.0, "versions": {}, "passage_words": 0, "budget": 8,
        "questions": {"test": {"musique": 2}, "train": {"hotpotqa": 1}, "passages": 0},
    }  # fmt: skip
    write_report(tmp_path, results, facts)
    lines = (tmp_path / "papers_real.md").read_text().splitlines()
    means = {
        tuple(line.split(" ")[1:4:2]): line.split("| ")[2].split(" ")[0]
        for line in lines
        if " against " in line
    }
    # Means of the sets: PPO (1 + 1/2 + 0) / 3 and (0 + 1/2 + 0) / 3, GRPO, which has seed 1 alone,
    # (0 + 0 + 1) / 3. MuSiQue alone: -1.
    assert means == {
        ("PPO", "warm"): "+33.3",
        ("GRPO", "warm"): "+33.3",
        ("GRPO", "PPO"): "-16.7",
        ("PPO", "GRPO"): "-100.0",
    }
