import json
from dataclasses import asdict

import numpy as np
import pytest

from agent_envs import DataError
from benchmarks.scaling.__main__ import analyse, main
from benchmarks.scaling.cases import CASES, Case, work_of
from benchmarks.scaling.cost_model import (
    Assumptions,
    all_reduce_seconds,
    extrapolate,
    fit,
    non_negative_least_squares,
    predict,
)
from benchmarks.scaling.measure import TERMS, measure

COSTS = {
    "generate": {"waves": 1e-3, "sampled": 1e-4, "read": 1e-5, "attended": 1e-7},
    "environment": {"turns": 1e-3, "steps": 2e-3},
    "score": {"constant": 0.01, "trained": 1e-5},
    "train": {"constant": 0.05, "trained": 5e-5, "squared": 1e-8},
    "communication": {"constant": 0.002},
}


def as_measured(case, core_share=1.0):
    seconds = predict(case, COSTS)
    seconds["cpu"] = core_share * seconds["total"]
    return {
        "case": asdict(case),
        "seconds": {t: {"median": s, "least": s, "most": s} for t, s in seconds.items()},
        "num_steps": 1,
    }


def test_work_is_counted_as_by_hand():
    # two episodes of three turns; states of 10, 10 + 7 and 10 + 14 tokens, actions of 2
    work = work_of(episodes=2, turns=3, prompt=10, action=2, observation=5, processes=1)
    assert (work.waves, work.sampled) == (6, 12)
    assert work.read == 2 * (26 - 3 * 2)  # the last state and action, without what was sampled
    assert work.attended == 2 * 2 * (11 + 18 + 25)
    assert (work.trained, work.squared) == (2 * 26, 2 * 26**2)


def test_the_fit_finds_the_costs_that_made_the_measurements():
    fitted = fit([as_measured(case) for case in CASES])
    for case in CASES:
        assert predict(case, fitted)["total"] == pytest.approx(predict(case, COSTS)["total"])


def test_costs_are_never_negative():
    a = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    # the free fit would be 4 - x; the best that is not negative is a constant, the mean
    assert non_negative_least_squares(a, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_an_all_reduce_costs_a_ring_in_the_node_and_one_between_nodes():
    assumptions = Assumptions(
        parameters=1e9,
        gradient_bytes=2.0,
        node_bytes_per_second=1e11,
        network_bytes_per_second=1e10,
    )
    assert all_reduce_seconds(assumptions, 1) == 0
    # 2 * 7/8 * 2 GB at 100 GB/s; then 2 * 7/8 of an eighth of 2 GB at 10 GB/s
    assert all_reduce_seconds(assumptions, 8) == pytest.approx(0.035)
    assert all_reduce_seconds(assumptions, 64) == pytest.approx(0.035 + 0.04375)


def test_more_gpus_never_make_the_same_batch_slower_but_they_do_less_each():
    totals = [extrapolate(Assumptions(), n)["total"] for n in (1, 2, 8, 64)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] / totals[-1] < 64


def test_a_case_is_measured_by_every_term(tmp_path):
    case = Case(turns=2, group_size=2, observation_tokens=4, action_tokens=2)
    measured = measure(case, str(tmp_path), num_steps=1)
    seconds = {term: measured["seconds"][term]["median"] for term in (*TERMS, "total")}
    assert seconds["communication"] == 0
    assert seconds["total"] == pytest.approx(sum(seconds[term] for term in TERMS), abs=1e-4)
    assert all(seconds[term] > 0 for term in ("generate", "environment", "score", "train"))


def test_the_page_is_made_from_the_results(tmp_path):
    page, output = tmp_path / "page.md", tmp_path / "results.json"
    names = ("measured", "check", "assumptions", "extrapolated")
    lines = [
        f"<!-- begin {name}: made by python -m benchmarks.scaling -->\nold\n<!-- end {name} -->"
        for name in names
    ]
    page.write_text("\n".join(["# Title", *lines]), encoding="utf-8")
    output.write_text(json.dumps(analyse([as_measured(case) for case in CASES])), encoding="utf-8")
    main(["--output", str(output), "--page", str(page), "--from_measured"])
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.count("(held out)") == sum(case.is_held_out for case in CASES)
    assert "off by 0%" in text
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")

    assert "100% of its core." in text

    output.write_text(json.dumps(analyse([as_measured(case, 0.4) for case in CASES])))
    main(["--output", str(output), "--page", str(page), "--from_measured"])
    assert "the machine was busy" in page.read_text(encoding="utf-8")

    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(DataError, match="begin measured"):
        main(["--output", str(output), "--page", str(page), "--from_measured"])
