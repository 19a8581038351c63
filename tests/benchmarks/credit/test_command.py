import json
from dataclasses import replace

import pytest

from agent_envs.errors import DataError
from agent_trainers.cli.train_options import parse_arguments
from benchmarks.credit import __main__ as credit
from benchmarks.credit.__main__ import main, plan, read_options
from benchmarks.credit.policies import _algorithm
from benchmarks.credit.report import NOT_RUN
from benchmarks.credit.true_advantages import load_batches, save_batches
from tests.benchmarks.credit.test_rows import BATCH, episode
from tests.benchmarks.credit.test_rows import batch as make_batch


def test_a_file_of_true_advantages_comes_back_as_it_was(tmp_path):
    for name in ("truth.jsonl", "truth.jsonl.gz"):
        save_batches(tmp_path / name, [BATCH, BATCH])
        assert load_batches(tmp_path / name) == [BATCH, BATCH]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("stage"), "row 1: field 'stage' is missing"),
        (lambda r: r["episodes"][1].pop("rewards"), "row 1, episode 2: field 'rewards' is missing"),
        (lambda r: r["episodes"][0].update(reward=1), "there is no field 'reward'"),
        (lambda r: r["episodes"][0]["advantages"].pop(), "episode 1: 'advantages' must hold one"),
        (lambda r: r["episodes"][0]["halves"][1].pop(), r"'halves\[1\]' must hold one entry"),
        (lambda r: r.update(episodes=[3]), "episode 1: must be an object, not int"),
    ],
)
def test_a_wrong_file_is_named_with_row_and_field(tmp_path, change, message):
    path = tmp_path / "truth.jsonl"
    save_batches(path, [BATCH])
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        load_batches(path)


def test_own_estimators_are_scored_on_a_published_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_truth.py").write_text(
        "def knows(episodes):\n    return [e.advantages for e in episodes]\n"
    )
    monkeypatch.chdir(tmp_path)
    truth = make_batch(episode(), episode(advantages=[-0.25, -0.5], halves=[[-0.25, -0.5]] * 2))
    save_batches(tmp_path / "truth.jsonl", [truth])
    main(["--truth", "truth.jsonl", "--estimator", "mine_truth:knows", "--output", "out"])
    shown = capsys.readouterr().out
    # its truth is exact, so what is the truth correlates with 1
    assert "| mine_truth:knows | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] |" in shown
    assert f"| {NOT_RUN} |" in shown  # nothing was trained
    figures = json.loads((tmp_path / "out" / "credit.json").read_text())
    assert figures["environments"]["e"]["mine_truth:knows"]["sign"]["value"] == 1.0
    assert (tmp_path / "out" / "credit.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_command_goes_on_and_names_what_is_not_run(tmp_path, monkeypatch, capsys):
    done = []

    def do(cell, options, work):
        if done:
            raise KeyboardInterrupt
        done.append(cell)
        (work / cell.path).parent.mkdir(parents=True, exist_ok=True)
        place = {"environment": cell.environment, "stage": cell.name, "seed": cell.seed}
        save_batches(work / cell.path, [replace(BATCH, **place)])

    monkeypatch.setattr(credit, "_do", do)
    arguments = ["--envs", "multi-hop", "--stages", "start", "--seeds", "1", "2",
                 "--train", "false", "--work", str(tmp_path / "work"),
                 "--output", str(tmp_path / "out")]  # fmt: skip
    with pytest.raises(SystemExit, match="goes on"):
        main(arguments)
    table = (tmp_path / "out" / "credit.md").read_text()
    assert f"| multi-hop | start | 2 | {NOT_RUN} |" in table
    first, done[:] = list(done), []
    main(arguments)
    assert NOT_RUN not in (tmp_path / "out" / "credit.md").read_text().partition("The truth")[2]
    assert not set(first) & set(done)
    assert [cell.seed for cell in first + done] == [1, 2]
    with pytest.raises(SystemExit, match="other settings"):
        main([*arguments, "--num_tasks", "3"])


def test_stages_come_from_a_run_that_is_done_before():
    cells = list(plan(read_options(["--envs", "multi-hop", "--seeds", "1"])))
    assert (cells[0].name, cells[0].is_truth) == ("grpo_step", False)
    assert [c.name for c in cells[1:4]] == ["start", "middle", "late"]
    names = [c.name for c in cells if not c.is_truth]
    assert len(names) == len(set(names))
    assert {"grpo", "gigpo", "step_ppo", "reinforce++"} < set(names)


def test_own_estimators_are_trained_as_those_of_the_package_are(tmp_path, monkeypatch):
    (tmp_path / "mine_plan.py").write_text(
        "def one(episodes): ...\ndef two(episodes, *, values): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["mine_plan:one", "mine_plan:two"]
    cells = list(plan(read_options(["--envs", "tables", "--seeds", "1", "--estimator", *own])))
    assert [c.name for c in cells[-2:]] == own
    assert all(":" not in str(cell.path) for cell in cells)
    settings = [parse_arguments(_algorithm(name))[1] for name in own]
    assert [s.advantage_estimator for s in settings] == own
    assert [hasattr(s, "value_coef") for s in settings] == [False, True]


def test_the_short_form_is_smaller_unless_told_otherwise():
    short = read_options(["--short", "--num_tasks", "3"])
    assert (short.num_tasks, short.seeds, short.train) == (3, [1], False)
