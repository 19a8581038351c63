"""A hundred forgeries of twelve kinds are found, and ten true runs raise no alarm."""

import itertools
import shutil

import pytest

from agent_leaderboard.play.config import load_configs
from agent_leaderboard.play.run import run
from agent_leaderboard.report.tables import write_reports
from agent_leaderboard.verify.verify import check_run
from tests.agent_leaderboard.forgeries import KINDS, plant
from tests.agent_leaderboard.small_config import write_config

NUM_FORGERIES = 100
CONFIG = """
protocol: {{samples_per_task: {samples}, concurrency: {concurrency}, seed: {seed}}}
environments:
  - {{id: AgentR1/SyntheticTable-v0, name: table, kwargs: {{split: test}}, tasks: 2,
     contamination: none}}
  - {{id: AgentR1/SyntheticMultiHop-v0, name: hops, tasks: 3,
     kwargs: {{split: {split}, hops: {hops}}}, contamination: none}}
  - {{id: AgentR1/HotpotQA-v0, kwargs: {{data: "${{data}}/hotpot.jsonl"}}, contamination: made up}}
agents:
  - {{name: random, kind: random}}
  - {{name: rules, kind: heuristic}}
  - {{name: oracle, kind: oracle}}
  - {{name: small, kind: checkpoint, settings: {{model: embedded}}}}
  - {{name: voting, kind: best_of_n, settings: {{model: embedded, samples: 2}}}}
"""


def play(folder, data, **values):
    values = {"samples": 1, "concurrency": 8, "seed": 5, "split": "test", "hops": 2} | values
    config = load_configs([write_config(folder, CONFIG.format(**values))])
    made = run(config, folder / "run", data=data).path
    write_reports(made, data)
    return made


@pytest.fixture(scope="module")
def true_run(tmp_path_factory, small_data):
    return play(tmp_path_factory.mktemp("true"), small_data)


def test_a_true_run_raises_no_alarm(true_run, small_data):
    found = check_run(true_run, small_data)
    assert found.problems == []
    assert [text.partition(":")[0] for text in found.on_trust] == ["small", "voting"]


def test_every_forgery_of_a_hundred_is_found(true_run, small_data, tmp_path):
    missed, planted = [], 0
    seeds = itertools.count()
    while planted < NUM_FORGERIES:
        kind = list(KINDS)[planted % len(KINDS)]
        seed = next(seeds)
        folder = tmp_path / "forged"
        shutil.copytree(true_run, folder)
        if plant(folder, kind, seed):
            planted += 1
            if not check_run(folder, small_data).problems:
                missed.append((kind, seed))
        shutil.rmtree(folder)
    assert missed == []


@pytest.mark.parametrize(
    "values",
    [
        {"seed": 0},
        {"seed": 7, "samples": 2},
        {"seed": 2**40, "concurrency": 1},
        {"hops": 1, "split": "train"},
        {"hops": "[1, 2]", "concurrency": 3},
        {"hops": 3, "samples": 3},
        {"seed": 11, "concurrency": 64},
        {"seed": 12, "samples": 2, "split": "validation"},
        {"seed": 13, "hops": 2},
    ],
)
def test_nine_more_true_runs_raise_no_alarm(values, small_data, tmp_path):
    found = check_run(play(tmp_path, small_data, **values), small_data)
    assert found.problems == []
    assert found.is_whole
