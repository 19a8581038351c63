"""Training against a vLLM server: TRL's own client, HTTP, and a stand-in at the other end."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from agent_trainers.cli import train
from agent_trainers.recipes import FOLDER
from agent_trainers.trainers.generation import equal_shares

REPOSITORY = Path(__file__).parents[3]

needs_requests = pytest.mark.skipif(
    importlib.util.find_spec("requests") is None, reason="TRL's client needs requests"
)


def run(output, num_processes):
    launcher = [sys.executable]
    if num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc_per_node", str(num_processes)]
    result = subprocess.run(
        [*launcher, "-m", "tests.agent_trainers.policies.vllm_server_run", str(output)],
        capture_output=True, text=True, timeout=200, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What one and two processes made of the same batches, sampled by one server."""
    folder = tmp_path_factory.mktemp("server")
    return run(folder / "one.pt", 1), run(folder / "two.pt", 2)


@needs_requests
def test_two_processes_that_share_a_server_give_the_weights_of_one(trained):
    one, two = trained
    assert two["reward"] == pytest.approx(one["reward"])
    for name, weight in one["weights"].items():
        assert torch.allclose(weight, two["weights"][name], atol=1e-6), name


@needs_requests
def test_processes_bring_unequal_numbers_of_prompts_and_take_part_with_none(trained):
    first, second = trained[1]["brought"]
    assert len(first) == len(second)  # every call is made by both
    assert any(a != b for a, b in zip(first, second, strict=True))
    assert 0 in first + second
    # one completion per prompt, and a request is filled up by one prompt at most
    needed = [a + b for a, b in zip(first, second, strict=True)]
    assert trained[1]["asked"] == [count + count % 2 for count in needed]
    assert trained[0]["asked"] == trained[0]["brought"][0] == needed


@needs_requests
def test_the_server_gets_the_weights_once_per_optimiser_step(trained):
    for result in trained:
        assert result["calls"].count("/update_weights") == 3
        assert result["calls"].count("/init_weight_transfer_engine") == 1
        updates = [call for call in result["calls"] if call != "/v1/completions"][1:5]
        assert updates == [
            "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/reset_prefix_cache",
        ]  # fmt: skip
        # the last update was before the last optimiser step
        moved = [
            (result["server_weights"][n] - w).abs().max() for n, w in result["weights"].items()
        ]
        assert 0 < max(moved) < 0.5


def test_shares_are_equal_and_hold_everything_in_order():
    assert equal_shares([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5, 1]]
    assert equal_shares([1], 3) == [[1], [1], [1]]
    assert equal_shares([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]
    assert equal_shares([], 2) == [[], []]


def test_the_recipe_for_a_server_differs_from_the_colocated_one_in_vllm_alone():
    server, colocated = (
        yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
        for name in ("hotpotqa_grpo_server.yaml", "hotpotqa_grpo.yaml")
    )
    arguments = ["--config", "hotpotqa_grpo_server", "--use_cpu", "--bf16", "false"]
    _, config = train.parse_arguments(arguments)
    assert config.vllm_mode == "server"
    differing = {name for name in server | colocated if server.get(name) != colocated.get(name)}
    assert {name for name in differing if not name.startswith("vllm_")} == {"output_dir"}
