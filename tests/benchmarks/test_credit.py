"""Estimators scored on true advantages, the file of the truth, and the command."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from agent_envs.errors import ConfigurationError, DataError, UnknownNameError
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS
from agent_trainers.recipes import find_turn_length
from benchmarks.credit import __main__ as credit
from benchmarks.credit.policies import SaveStages
from benchmarks.credit.scores import (
    BRANCHING,
    CEILINGS,
    NOT_RUN,
    Row,
    all_estimators,
    estimates_of,
    rows_of,
)
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode, load_batches, save_batches
from benchmarks.learning_run import EnvironmentStepBudget
from tests.benchmarks.test_credit_scores import COSTS


def episode(**changes):
    settings = {"group_id": "g", "rewards": [0.0, 1.0], "lengths": [2, 3], "anchors": ["x", "y"],
                "states": ["x", "xy"], "reward_terms": [{}, {"outcome": 1.0}],
                "values": [[0.5, 0.5], [0.75, 0.5, 0.25]], "advantages": [0.25, 0.5],
                "standard_errors": [0.1, 0.1], "halves": [[0.25, 0.5]] * 2}  # fmt: skip
    return CreditEpisode(**(settings | changes))


def batch_of(*episodes):
    return CreditBatch(
        environment="e", stage="s", seed=1, success=0.5, reliability=1.0,
        reliability_by_variance=1.0, costs=COSTS, episodes=list(episodes),
    )  # fmt: skip


BATCH = batch_of(
    episode(), episode(rewards=[0.0, 0.0], anchors=["x", "z"], states=["x", "xz"])
)  # fmt: skip


def test_every_estimator_of_the_package_is_scored():
    rows = rows_of(all_estimators())
    assert {row.estimator for row in rows} == {*CEILINGS, *ADVANTAGE_ESTIMATORS, *BRANCHING}
    for row in rows:
        estimates = estimates_of(row, BATCH)
        assert [len(e) for e in estimates] == [2, 2], row.name
        assert all(np.isfinite(e).all() for e in estimates), row.name


def test_estimators_with_values_are_scored_with_and_without_a_critic():
    names = [row.name for row in rows_of(["gae_step", "grpo"])]
    assert names == ["gae_step, no critic", "gae_step, critic", "gae_step, critic, lam 0.9", "grpo"]
    options = {"whiten": False}
    # return 1 less V(x) = 0.5 and V(y) = 0.75; without a critic 1 and 1
    critic, no_critic = (
        Row("r", "gae_step", kind, options) for kind in ("critic", "no critic")
    )  # fmt: skip
    assert estimates_of(critic, BATCH)[0].tolist() == [0.5, 0.25]
    assert estimates_of(no_critic, BATCH)[0].tolist() == [1.0, 1.0]
    # token advantages at lambda 1, averaged over each step: values 0.5 0.5 | 0.75 0.5 0.25
    tokens = Row("r", "gae_token", "critic", options)
    assert estimates_of(tokens, BATCH)[0].tolist() == [0.5, 0.5]
    bare = batch_of(episode(values=[]))
    assert estimates_of(critic, bare) == NOT_RUN
    assert estimates_of(no_critic, bare) != NOT_RUN


@pytest.mark.parametrize("estimator", ["tree", "vine"])
def test_branches_are_given_to_estimators_that_use_them_and_are_not_scored(estimator):
    # another branch from y gets nothing: V(y) is 1/2, and the last step is worth 1/2 or -1/2
    branch = episode(rewards=[0.0, 0.0], start=1, advantages=[], standard_errors=[], halves=[])
    seen = batch_of(*BATCH.episodes, branch)
    with_branch, without = (estimates_of(Row("r", estimator), b) for b in (seen, BATCH))
    assert len(with_branch) == len(without) == 2
    assert not np.allclose(with_branch[0], without[0])
    grpo = Row("grpo", "grpo")
    assert np.allclose(estimates_of(grpo, seen), estimates_of(grpo, BATCH))


def test_custom_estimators_are_scored_on_a_published_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_credit.py").write_text(
        "def knows(episodes):\n    return [e.advantages for e in episodes]\n"
        "def too_long(episodes):\n    return [[0.0] * 9 for _ in episodes]\n"
    )
    monkeypatch.chdir(tmp_path)
    truth = batch_of(episode(), episode(advantages=[-0.25, -0.5], halves=[[-0.25, -0.5]] * 2))
    save_batches(tmp_path / "truth.jsonl.gz", [truth])
    assert load_batches(tmp_path / "truth.jsonl.gz") == [truth]
    arguments = ["--truth", "truth.jsonl.gz", "--output", "out", "--estimator"]
    credit.main([*arguments, "mine_credit:knows"])
    # the truth correlates with itself; the batch has no gradients
    shown = capsys.readouterr().out
    expected = "undefined | not estimable | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | 1.00 |"
    assert f"| mine_credit:knows | {expected}" in shown
    figures = json.loads((tmp_path / "out" / "credit.json").read_text())
    assert figures["environments"]["e"]["mine_credit:knows"]["sign"]["value"] == 1.0
    (row,) = rows_of(["mine_credit:too_long"])
    with pytest.raises(ConfigurationError, match="9 advantages for an episode of 2 steps and 5"):
        estimates_of(row, BATCH)
    with pytest.raises(UnknownNameError, match="gigpo"):
        rows_of(["gigpa"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("format"), "row 1: format None, not 2. Make the file again with python"),
        (lambda r: r.update(format=1), "row 1: format 1, not 2"),
        (lambda r: r["episodes"][0].update(gradients=["AA="] * 2), "row 1: episodes: gradients"),
        (
            lambda r: r["episodes"][0].update(gradients=["AAA=", "AAAAAA=="]),
            "row 1: episodes: gradients",
        ),
        (lambda r: r.pop("stage"), "row 1: stage: Field required"),
        (lambda r: r["episodes"][0].update(reward=1), r"episodes\.0\.reward: Unexpected"),
        (lambda r: r["episodes"][0]["advantages"].pop(), r"episodes\.0\.advantages: 1 entries"),
        (lambda r: r["episodes"][0]["halves"][1].pop(), r"episodes\.0\.halves\.1: 1 entries for 2"),
    ],
)
def test_an_invalid_file_is_reported_with_row_and_field(tmp_path, change, message):
    path = tmp_path / "truth.jsonl"
    save_batches(path, [BATCH])
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        load_batches(path)


def test_a_stopped_command_resumes_and_names_what_is_not_run(tmp_path, monkeypatch, capsys):
    done = []

    def compute(grid, cell, options):
        if len(done) == 1:
            done.append(None)
            raise KeyboardInterrupt
        done.append(cell.seed)
        place = {"environment": cell.environment, "stage": cell.stage, "seed": cell.seed}
        save_batches(grid.work / f"{cell.key}.jsonl.gz", [replace(BATCH, **place)])
        return {}

    monkeypatch.setattr(credit, "compute", compute)
    arguments = ["--envs", "multi-hop", "--stages", "start", "--seeds", "1", "2",
                 "--work", str(tmp_path / "work"), "--output", str(tmp_path / "out")]  # fmt: skip
    with pytest.raises(SystemExit) as stopped:
        credit.main(arguments)
    assert stopped.value.code == 130
    table = (tmp_path / "out" / "credit.md").read_text()
    assert f"| multi-hop | start | 2 | {NOT_RUN} |" in table
    credit.main(arguments)
    assert NOT_RUN not in (tmp_path / "out" / "credit.md").read_text().partition("## True")[2]
    assert done == [1, None, 2]
    with pytest.raises(SystemExit):
        credit.main([*arguments, "--num_tasks", "3"])
    assert "other settings" in capsys.readouterr().err
    next((tmp_path / "work").rglob("*.jsonl.gz")).unlink()
    with pytest.raises(SystemExit):
        credit.main(arguments)
    assert "is missing, although results.jsonl lists it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("solved", "expected"),
    [
        pytest.param([0.1, 0.1, 0.2, 0.3, 0.3], {"middle": 3, "late": 5}, id="not reached"),
        pytest.param([0.1, 0.2, 0.3, 0.8, 0.9], {"middle": 3, "late": 4}, id="late"),
    ],
)
def test_stages_are_saved_at_their_success_or_else_half_way_and_at_the_end(
    tmp_path, solved, expected
):
    start, folder = tmp_path / "start", tmp_path / "run"
    start.mkdir()
    (start / "recipe.yaml").write_text("max_completion_length: 48\n")
    version = 0

    def save_pretrained(path):
        path.mkdir(parents=True, exist_ok=True)
        (path / "version").write_text(str(version))

    model = SimpleNamespace(save_pretrained=save_pretrained)
    batches = iter(solved)
    steps = EnvironmentStepBudget(100, lambda: (20, next(batches)))
    trainer = SimpleNamespace(model=model, processing_class=model)
    stages = SaveStages(trainer, start, folder, steps)
    for version in range(1, 1 + len(solved)):  # noqa: B007 - read by save_pretrained
        steps.on_step_end(None, None, SimpleNamespace())
        stages.on_step_end()
    stages.save_missing()
    saved = {stage: int((folder / stage / "version").read_text()) for stage in ("middle", "late")}
    assert saved == expected
    assert stages.saved == {stage: solved[number - 1] for stage, number in expected.items()}
    assert find_turn_length(str(folder / "late"))[0] == 48
