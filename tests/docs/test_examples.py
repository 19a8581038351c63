"""The scripts in examples/ run as they stand; some are compiled, for others test them."""

import contextlib
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COMPILED = (
    "train_on_a_ray_cluster.py",
    *("train_agents_sdk.py", "train_langgraph.py", "train_smolagents.py"),  # test_frameworks
    "workflows.py",  # test_workflows
)
BRIEFLY = ["--max_steps=1", "--num_eval_tasks=2", "--per_device_train_batch_size=8"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("default")  # a reader's Python does not turn warnings into errors
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name, tmp_path, monkeypatch, data_files, capsys):
    monkeypatch.chdir(tmp_path)
    given = BRIEFLY if name == "train_openai_loop.py" else [str(data_files["AgentR1/HotpotQA-v0"])]
    monkeypatch.setattr(sys, "argv", [name, *given])
    if name in COMPILED:
        compile((EXAMPLES / name).read_text(encoding="utf-8"), name, "exec")
        return
    ends = pytest.raises(SystemExit, match="0") if given is BRIEFLY else contextlib.nullcontext()
    with ends:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("given", [["--output_dir=own"], ["--output-dir", "own"], []])
def test_an_example_overwrites_no_folder_that_was_given(given, tmp_path, monkeypatch):
    from examples import train_openai_loop

    found = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train_openai_loop.py", *given])
    monkeypatch.setattr("agent_trainers.cli.train.main", found.extend)
    train_openai_loop.train("a_module:run", "openai_loop")
    assert ("--overwrite" in found) == (str(Path("runs/openai_loop")) in found) == (not given)
    assert found[len(found) - len(given) :] == given
