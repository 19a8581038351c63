import json
import subprocess
import sys

import pytest
import torch

from agent_envs import ConfigurationError
from agent_trainers.cli import dry_run, train
from agent_trainers.cli.train_options import parse_arguments

SHORT = ["--dry_run", "--num_generations", "4", "--per_device_train_batch_size", "8"]


def files(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], ["2 groups, 8 episodes", "merged", "drift, mean", "forward and backward"]),
        (["--algorithm", "step_ppo", "--env_kwargs",
          json.dumps({"context": {"name": "window", "turns": 1}, "hops": 3})],
         ["a new row begins here", "window: the last 1 turns", "value", "critic explains"]),
    ],
    ids=["grpo", "ppo in a window"],
)  # fmt: skip
def test_a_dry_run_shows_a_batch_and_saves_no_weights(tmp_path, capsys, arguments, shown):
    train.run([*SHORT, *arguments, "--output_dir", str(tmp_path / "run")])
    out = capsys.readouterr().out
    for part in ("step by step", "reward", "advantage", "one optimiser step", "peak so far",
                 "No weights were changed", *shown):  # fmt: skip
        assert part in " ".join(out.split())
    assert files(tmp_path) == ["dry_run.html"]
    assert "Step 1" in (tmp_path / "run" / "dry_run.html").read_text(encoding="utf-8")


def test_a_dry_run_changes_neither_the_model_nor_an_earlier_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    options, config = parse_arguments([*SHORT, "--output_dir", str(tmp_path)])
    dry_run.prepare(config)
    trainer, _ = train.make_trainer(options, config)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.is_deepspeed_enabled = True  # which updates in the backward pass
    with pytest.raises(ConfigurationError, match="--dry_run does not work with DeepSpeed"):
        dry_run.dry_run(trainer, "a run")
    trainer.is_deepspeed_enabled = False
    dry_run.dry_run(trainer, "a run")
    assert all(torch.equal(before[name], w) for name, w in trainer.model.state_dict().items())
    assert trainer.state.global_step == 0
    assert any(p.grad is not None for p in trainer.model.parameters())  # it went all the way
    assert files(tmp_path) == ["dry_run.html", "metrics.jsonl"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_two_processes_show_one_batch(tmp_path):
    command = [sys.executable, "-m", "agent_trainers.cli.train", "--num_processes", "2", *SHORT]
    result = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert "4 groups, 16 episodes" in result.stdout
    assert result.stdout.count("No weights were changed") == 1
    assert files(tmp_path) == ["dry_run.html"]
