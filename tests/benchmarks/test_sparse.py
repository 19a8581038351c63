import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_envs.errors import ConfigurationError
from benchmarks import grid, sparse
from benchmarks.credit.regime_run import run_cell
from benchmarks.sparse import ARMS, STARTS, SparseArguments, cell_name, choose_rates
from tests.benchmarks.test_regimes import fake_run_cell


def test_arms_differ_in_the_method_alone_and_only_the_answer_pays():
    options = SparseArguments(seeds=[1])
    cells = sparse.run_cells(options, [("5 %", 1), ("1 %", 1)], dict.fromkeys(ARMS, 1e-3))
    assert len(cells) == 2 * len(ARMS)
    grpo, *others = (cells[cell_name("5 %", arm, 1, 1e-3)]["run"] for arm in ARMS)
    for other in others:
        assert {key for key in grpo if grpo[key] != other[key]} <= {"method", "options"}
        assert other["options"][: len(grpo["options"])] == grpo["options"]
    assert grpo["env_kwargs"]["rewards"] == {"exact_match": 1.0}
    assert grpo["start"].endswith("5_percent-1/policy")
    assert cells[cell_name("1 %", "grpo", 1, 1e-3)]["run"]["start"] is None
    (start,) = sparse.start_cells([("1 %", 1), ("1 %", 2)]).values()  # the same policy
    assert start["start"] is None


def test_the_rate_with_the_fewest_episodes_is_chosen():
    options = SparseArguments(tuning_seeds=[101], learning_rates=[2e-3, 1e-3, 5e-4])
    episodes = {5e-4: 900, 1e-3: 600, 2e-3: None}
    tuned = {
        cell_name("5 %", arm, 101, rate): {"steps": steps if arm == "grpo" else None,
                                           "curve": [(64, rate)]}
        for arm in ARMS for rate, steps in episodes.items()
    }  # fmt: skip
    rates = choose_rates(options, tuned)
    assert rates["grpo"] == 1e-3
    assert rates["max_rl"] == 2e-3  # none got there: the most success


def test_seeds_of_runs_do_not_choose_learning_rates():
    with pytest.raises(ConfigurationError, match="each once"):
        SparseArguments(seeds=[1, 1])
    with pytest.raises(ConfigurationError, match=r"\[101\] are those that choose"):
        SparseArguments(seeds=[1, 101])


def test_a_stopped_call_resumes_and_the_report_is_complete(tmp_path, monkeypatch):
    done = []
    fake = fake_run_cell(done, steps_per_letter=100)
    monkeypatch.setattr(grid, "ProcessPoolExecutor", lambda jobs, **_: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(sparse, "run_cell", fake)
    options = ["--seeds", "1", "2", "--work", str(tmp_path / "work"), "--output", str(tmp_path)]
    sparse.main(options)
    # tuning: starts and rates with two seeds; then three starts, of which one has no seeds
    assert len(done) == 2 + 2 * 3 * len(ARMS) + 2 + 2 + 1 + 3 * 2 * len(ARMS)
    text = (tmp_path / "sparse.md").read_text()
    assert text.count("| max_rl | 600 ± 0 | 0 of 2 |") == len(STARTS)
    assert "*max_rl* needs at most the episodes of *grpo*: **did not hold** (600 and 400)" in text
    assert json.loads((tmp_path / "sparse.json").read_text())["learning_rates"]["grpo"] == 2e-4
    assert (tmp_path / "sparse.png").stat().st_size > 0
    done.clear()
    sparse.main(options)
    assert done == []


def test_a_run_counts_the_episodes_of_discarded_groups(tmp_path):
    options = SparseArguments(seeds=[1], budget=48, work=str(tmp_path))
    cells = sparse.run_cells(options, [("1 %", 1)], dict.fromkeys(ARMS, 1e-3))
    result = run_cell(cells[cell_name("1 %", sparse.DYNAMIC, 1, 1e-3)], tmp_path / "run")
    counts = [count for count, _ in result["curve"]]
    assert counts[-1] >= 48
    # 1 of 100 episodes succeeds, so all extra groups are used: 4 + 16 of 8 episodes
    assert counts[0] > sparse.NUM_EPISODES
    assert counts[0] % 8 == 0
