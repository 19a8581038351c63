import json
from dataclasses import asdict

import pytest

from agent_envs import DataError
from benchmarks.scaling.__main__ import BEGIN, END, main
from benchmarks.scaling.cases import CASES, Case
from benchmarks.scaling.measure import TERMS, measure


def as_measured(case, core_share):
    seconds = dict.fromkeys(TERMS, 0.25) | {"total": 1.25, "cpu": core_share * 1.25}
    return {
        "case": asdict(case),
        "seconds": {t: {"median": s, "least": s, "most": s} for t, s in seconds.items()},
        "num_steps": 1,
    }


def test_a_case_is_measured_by_every_term(tmp_path):
    case = Case(turns=2, group_size=2, observation_tokens=4, action_tokens=2)
    measured = measure(case, str(tmp_path), num_steps=1)
    seconds = {term: measured["seconds"][term]["median"] for term in (*TERMS, "total")}
    assert seconds["communication"] == 0
    assert seconds["total"] == pytest.approx(sum(seconds[term] for term in TERMS), abs=1e-4)
    assert all(seconds[term] > 0 for term in ("generate", "environment", "score", "train"))


def test_the_page_is_made_from_the_results(tmp_path):
    page, output = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"# Title\n{BEGIN}\nold\n{END}\nbelow", encoding="utf-8")
    make_page = ["--output", str(output), "--page", str(page), "--from_measured"]

    output.write_text(json.dumps({"cases": [as_measured(case, 1.0) for case in CASES]}))
    main(make_page)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert text.startswith("# Title\n")
    assert text.endswith("\nbelow")
    assert text.count("1.25 to 1.25") == len(CASES)
    assert "100% of its core." in text

    output.write_text(json.dumps({"cases": [as_measured(case, 0.4) for case in CASES]}))
    main(make_page)
    assert "the machine was busy" in page.read_text(encoding="utf-8")

    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(DataError, match="begin measured"):
        main(make_page)
