"""Training with vLLM through TRL's own path: the engine samples with the current weights."""

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` does it")

from peft import LoraConfig

from agent_trainers import TINY_POLICY, StepGRPOConfig, StepGRPOTrainer
from agent_trainers.policies.models import load_model, load_tokenizer
from benchmarks.performance import engines
from tests.agent_trainers.short_run import SETTINGS
from tests.served_model import free_port

ID = "AgentR1/SyntheticMultiHop-v0"
DRIFT = "sampling/sampling_logp_difference/max"


def train(model, folder, *, peft_config=None, **changes):
    """Take three large steps; return the largest drift of each, and how far the weights moved."""
    config = StepGRPOConfig(**SETTINGS | {
        "output_dir": str(folder / "run"), "max_steps": 3, "learning_rate": 0.3, "optim": "sgd",
        "use_vllm": True, "vllm_max_model_length": 1024, "max_logprob_drift": None, **changes,
    })  # fmt: skip
    tokenizer = load_tokenizer(model)
    trainer = StepGRPOTrainer(
        model, ID, config, processing_class=tokenizer, peft_config=peft_config
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    pairs = zip(before, trainer.model.parameters(), strict=True)
    moved = max(float((a - b.detach()).abs().max()) for a, b in pairs)
    drifts = [row[DRIFT] for row in trainer.state.log_history if DRIFT in row]
    return drifts, moved


def save_with_own_head(folder):
    """Save the embedded policy with a head that does not share the weight of the embeddings."""
    model = load_model(str(TINY_POLICY))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    load_tokenizer(str(TINY_POLICY)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["tied head", "own head", "adapters"])
def test_colocated_engine_samples_with_the_current_weights(kind, tmp_path):
    model, options = str(TINY_POLICY), {}
    if kind == "own head":
        model = save_with_own_head(tmp_path / "model")
    if kind == "adapters":
        adapters = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
        options = {"peft_config": adapters, "learning_rate": 30.0}
    drifts, moved = train(model, tmp_path, vllm_mode="colocate", **options)
    assert moved > 1e-2
    assert len(drifts) == 3
    assert max(drifts) < 1e-3


def test_server_samples_with_the_current_weights(server, tmp_path):
    options = {"vllm_server_base_url": server, "vllm_group_port": free_port()}
    drifts, moved = train(str(TINY_POLICY), tmp_path, vllm_mode="server", **options)
    assert moved > 1e-2
    assert len(drifts) == 3
    assert max(drifts) < 1e-3


def test_server_takes_weights_while_rollouts_run_ahead(server, tmp_path):
    """Six updates arrive amid requests; the last ones are sampled with weights that moved."""
    options = {"vllm_server_base_url": server, "vllm_group_port": free_port()}
    options |= {"rollout": "async", "max_staleness": 2, "max_steps": 6, "learning_rate": 0.01}
    drifts, moved = train(str(TINY_POLICY), tmp_path, vllm_mode="server", **options)
    assert moved > 1e-3
    assert len(drifts) == 6
    assert max(drifts) < 0.5  # of tokens sampled with the weights of up to three updates before


def test_two_processes_share_a_server(server, tmp_path):
    command = [
        sys.executable, "-m", "agent_trainers.cli.train", "--num_processes", "2", "--use_cpu",
        "--use_vllm", "--vllm_mode", "server", "--vllm_server_base_url", server,
        "--vllm_group_port", str(free_port()), "--max_steps", "3", "--num_eval_tasks", "0",
        "--per_device_train_batch_size", "16", "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=1700)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    drifts = [row[DRIFT] for row in map(json.loads, lines) if DRIFT in row]
    assert drifts
    assert max(drifts) < 1e-3


def test_the_default_run_ends_as_on_transformers(tmp_path):
    command = [
        sys.executable, "-m", "agent_trainers.cli.train", "--use_vllm", "--vllm_mode", "colocate",
        "--use_cpu", "--seed", "42", "--output_dir", str(tmp_path / "run"),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=1700)
    results = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert results["success_after"] >= 0.95


def test_trls_asynchronous_trainer_is_measured_on_a_cpu(tmp_path):
    options = ["--rounds", "1", "--steps", "1", "--warm_up", "1", "--episodes", "8"]
    output = tmp_path / "results.json"
    side = "trl asynchronous, vLLM"
    paths = ["--work", str(tmp_path), "--output", str(output)]
    engines.main([*options, "--sides", side, *paths])
    assert json.loads(output.read_text(encoding="utf-8"))[side]["median"] > 0
