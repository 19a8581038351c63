import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_trainers.cli.train import TINY_POLICY

SCRIPT = Path(__file__).parent / "distributed_run.py"


def train(output, num_processes, **settings):
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(num_processes)]
    command = [*launcher, str(SCRIPT), str(output), json.dumps(settings)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=SCRIPT.parents[2], check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(output, weights_only=False)


@pytest.mark.parametrize(
    ("algorithm", "context"),
    [
        ("grpo_step", "full"),
        ("gigpo", {"name": "window", "turns": 1}),
        ("step_ppo", "full"),
        ("ppo", {"name": "window", "turns": 1}),
    ],
)
def test_two_processes_give_the_result_of_one_with_the_same_global_batch(
    tmp_path, algorithm, context
):
    # 6 episodes a process and groups of 4: one group lies in both processes
    common = {"algorithm": algorithm, "context": context, "gradient_accumulation_steps": 2}
    one = train(tmp_path / "one.pt", 1, per_device_train_batch_size=6, **common)
    two = train(tmp_path / "two.pt", 2, per_device_train_batch_size=3, **common)
    assert sum(two["lengths"][0]) != sum(two["lengths"][1])  # ranks with different lengths
    assert one["lengths"][0] == [*two["lengths"][0], *two["lengths"][1]]
    for entry, other in zip(one["log"], two["log"], strict=True):
        assert entry["reward"] == pytest.approx(other["reward"])
        assert entry["success"] == pytest.approx(other["success"])
    start = AutoModelForCausalLM.from_pretrained(TINY_POLICY).state_dict()
    moved = [(w - start[name]).abs().max() for name, w in one["weights"].items() if name in start]
    assert max(moved) > 1e-3
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=1e-6), name
