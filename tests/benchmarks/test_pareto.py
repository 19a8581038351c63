import json

import pytest

from benchmarks.pareto import front, measured


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ({"a": (1.0, 3.0), "b": (0.5, 1.0), "c": (0.5, 2.0), "d": (0.0, 0.0)}, {"a", "b", "d"}),
        ({"a": (0.5, 1.0), "b": (0.5, 1.0)}, {"a", "b"}),  # equal ones do not beat each other
        ({"a": (0.5, 1.0), "b": (0.6, 1.0)}, {"b"}),
    ],
)
def test_the_front_holds_what_no_other_beats(points, best):
    results = {name: {"success": s, "tool calls": c} for name, (s, c) in points.items()}
    assert front(results, "tool calls") == best


def test_the_last_evaluation_is_measured(tmp_path):
    entries = [
        {"step": step, "eval_success": step / 10, "eval_metrics/num_tool_calls": 2.0,
         "eval_completions/mean_length": 30.0}
        for step in (0, 5)
    ]  # fmt: skip
    lines = [*entries, {"step": 5, "train_runtime": 1.0}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert measured(path) == {"success": 0.5, "tool calls": 2.0, "tokens": 30.0}
