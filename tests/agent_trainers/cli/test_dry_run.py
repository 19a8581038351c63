import json

import pytest
import torch

from agent_envs import ConfigurationError
from agent_trainers.cli import train
from agent_trainers.cli.environments import read_source
from agent_trainers.cli.results import dry_run
from agent_trainers.cli.train import parse_arguments

SHORT = ["--num_generations", "4", "--per_device_train_batch_size", "8",
         "--steps_per_generation", "1", "--save_strategy", "no"]  # fmt: skip


def test_a_dry_run_shows_a_batch_and_saves_no_weights(tmp_path, capsys):
    window = json.dumps({"context": {"name": "window", "turns": 1}, "hops": 3})
    train.run([*SHORT, "--dry_run", "--algorithm", "step_ppo", "--env_kwargs", window,
               "--output_dir", str(tmp_path / "run")])  # fmt: skip
    out = " ".join(capsys.readouterr().out.split())
    for part in ("2 groups, 8 episodes", "step by step", "a new row begins here",
                 "logp_difference/max: ", "window: the last 1 turns", "reward", "advantage",
                 "value", "No weights were changed"):  # fmt: skip
        assert part in out
    assert [path.name for path in tmp_path.rglob("*.*")] == ["dry_run.html"]
    assert "Step 1" in (tmp_path / "run" / "dry_run.html").read_text(encoding="utf-8")


def test_a_dry_run_changes_neither_the_model_nor_an_earlier_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    options, config = parse_arguments([*SHORT, "--output_dir", str(tmp_path)])
    trainer, _ = train.make_trainer(options, config, read_source(options))
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.is_deepspeed_enabled = True  # which updates in the backward pass
    with pytest.raises(ConfigurationError, match="--dry_run does not work with DeepSpeed"):
        dry_run(trainer, "a run")
    trainer.is_deepspeed_enabled = False
    dry_run(trainer, "a run")
    assert all(torch.equal(before[name], w) for name, w in trainer.model.state_dict().items())
    assert trainer.state.global_step == 0
    assert any(p.grad is not None for p in trainer.model.parameters())  # it went all the way
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
