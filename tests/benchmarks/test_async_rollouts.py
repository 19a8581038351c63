import json

import pytest

from benchmarks.performance import async_rollouts, kills


def test_both_kinds_of_run_are_compared_and_every_drawn_length_is_trained(tmp_path, capsys):
    output = tmp_path / "results.json"
    settings = {"seeds": 1, "steps": 2, "episodes": 8, "latency": 0, "tasks": 2, "output": output}
    async_rollouts.main([text for k, v in settings.items() for text in (f"--{k}", str(v))])
    assert "KS distance of drawn and trained lengths: 0.000 (n = 16)" in capsys.readouterr().out
    runs = json.loads(output.read_text())["runs"]
    for (one,) in runs.values():
        assert sorted(one["drawn"]) == sorted(one["trained"])
    assert runs["sync"][0]["trained"] == runs["async"][0]["trained"]  # one batch, of equal weights


def test_the_episodes_of_a_killed_run_are_those_that_survived(tmp_path):
    def write(*steps):
        lines = [json.dumps({"step": step, "episodes": [name]}) for step, name in steps]
        (tmp_path / kills.LOG).write_text("".join(line + "\n" for line in lines))

    write((0, "a"), (1, "b"), (2, "c"), (1, "d"), (2, "e"))  # resumed at step 1
    assert kills.trained_episodes(tmp_path) == [["a"], ["d"], ["e"]]
    write((0, "a"), (2, "c"))
    with pytest.raises(AssertionError, match="step 2 follows step 0"):
        kills.trained_episodes(tmp_path)
