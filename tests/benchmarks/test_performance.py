"""Smoke tests of the performance benchmarks at the smallest size."""

import importlib
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3ForCausalLM

from benchmarks import held_out
from benchmarks.performance import counts, gpu_check, gradients, memory, time_to_success, training
from benchmarks.performance.models import SHAPES, Settings, model_config
from benchmarks.performance.steps import PAIRS_PER_ROUND

TINY = Settings(
    rounds=1, step_model="tiny", gradient_model="tiny", num_episodes=4, num_generations=2,
    num_steps=(2,), memory_steps=2, num_trajectories=2, token_budget=1600, num_slow_episodes=8,
    num_calls=2,
    fast_seconds=0.001, slow_seconds=0.05,
)  # fmt: skip
STEP = {"time/rollout_seconds": 0.5, "time/score_seconds": 0.25, "time/train_seconds": 0.25}
COMMANDS = [
    "credit.__main__", "held_out", "papers_real.__main__",
    "papers_table", "performance.counts", "performance.engines", "performance.gpu_check",
    "performance.memory", "performance.time_to_success", "performance.training",
]  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"benchmarks.{name}").main()
    assert end.value.code in (0, None)
    assert "--" in capsys.readouterr().out


def test_training_is_measured_on_both_sides_with_the_same_episodes(monkeypatch):
    def peak(*arguments):  # in this process, whose memory may not grow
        return gradients._peak(*arguments) or 1

    monkeypatch.setattr(gradients, "peak_in_process", peak)
    results = {name: measure(TINY) for name, measure in training.PARTS.items()}  # means nothing
    json.dumps(results)
    # episodes x turns of the script, in each pair
    for name, expected in (
        ("step_vs_trl", [4 * 4] * PAIRS_PER_ROUND), ("slow_tools_vs_trl", [8 * (2 + 1)]),
    ):  # fmt: skip
        assert results[name]["environment_steps"] == {"ours": expected, "trl": expected}
    (one,) = results["merged_vs_rows"].values()
    speed = one["merged"]
    assert speed["tokens_per_second"] == pytest.approx(one["merged_tokens"] / one["ours"]["median"])
    assert one["token_ratio"] > 1
    lines = [line for name, result in results.items() for line in training.describe(name, result)]
    assert len(lines) == 5 + 1  # comparisons, and the speed of one


def test_the_formula_counts_the_operations_of_a_model():
    config = model_config(SHAPES["tiny"], 40, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.ones(3, 7, dtype=torch.long)).logits.sum().backward()
    # the model's own head: of all 3 * 7 tokens, and not applied again in the backward pass
    head = 3 * 7 * config.hidden_size * config.vocab_size
    assert counts.flops(config, 3, 7, 3 * 7) - 2 * head == counter.get_total_flops()


def test_the_goal_is_reached_at_the_first_of_two_consecutive_checkpoints():
    solved = {10: 0.99, 2: 0.5, 4: 0.95, 6: 0.85, 8: 0.9}
    found = time_to_success.summarize([STEP] * 12, solved)
    assert found["reached"] == {"steps": 8, "seconds": 8.0}
    assert found["seconds_per_step"]["score"] == 0.25
    assert time_to_success.summarize([STEP] * 4, {2: 0.5, 4: 1.0})["reached"] is None


@pytest.mark.parametrize("name", held_out.HELD_OUT)
def test_held_out_variants_differ_from_the_mixture_and_can_be_solved(name):
    changes = held_out.HELD_OUT[name]
    trained, changed = held_out.mixture().keywords, held_out.mixture(**changes).keywords
    for argument in {"variant", "hops", "top_k"} & changes.keys():
        value = changed[argument]
        assert not set(trained[argument]) & set(value if isinstance(value, list) else [value])
    env = held_out.mixture(**changes)()
    env.reset(options={"task": 0})
    for action in env.unwrapped.reference_actions():
        *_, info = env.step(action)
    assert info["metrics"]["success"] == 1.0


def test_what_a_machine_lacks_is_named_and_the_rest_is_measured():
    assert all(isinstance(way, tuple) for way in gpu_check.ways(2, has_vllm=True).values())
    on_cpu = gpu_check.ways(0, has_vllm=True)
    assert [w for w, options in on_cpu.items() if options == "needs a GPU"] == [
        "vLLM, colocated, sleep mode", "FSDP2, vLLM colocated",
    ]  # fmt: skip
    assert gpu_check.ways(1, has_vllm=True)["vLLM, server"] == "needs a second GPU"


def test_the_figures_of_a_device_are_medians_of_its_steps(monkeypatch):
    monkeypatch.setattr(gpu_check, "peak_flops", lambda: 1e9)
    rows = [
        {"completions/mean_length": 10 * k, "rows/tokens_per_second": 1e3, gpu_check.DRIFT: 0.1 * k,
         "time/rollout_seconds": 2.0, "time/score_seconds": 0.5, "time/train_seconds": k}
        for k in (1, 2, 3)
    ]  # fmt: skip
    found = gpu_check.summarise(rows, 50_000, 2**30, num_processes=2)
    assert found["sampled_tokens_per_second"] == pytest.approx(gpu_check.NUM_EPISODES * 10)
    assert found["utilisation"] == pytest.approx(6 * 50_000 * 1e3 / 1e9 / 2)
    assert (found["train_seconds"], found["peak_gib"], found["drift"]) == (2, 1, pytest.approx(0.3))
    assert "| 640 | 1,000 | 15.0% | 2.00 / 0.50 / 2.00 | 1.00 | 3.0e-01 |" in gpu_check.table(
        {"ways": {"transformers": found}}
    )


def test_the_memory_of_a_deep_model_follows_from_two_shallow_ones(monkeypatch):
    monkeypatch.setattr(memory, "TOKENS", 256)
    shape = (32, 64, 4, 2, 2, 16, 64)
    config = model_config(shape, 0)
    for checkpoints in (False, True):
        whole = memory.predict(config, 256, bf16=True, checkpoints=checkpoints)
        deep = memory.predict_deep(shape, is_tied=True, checkpoints=checkpoints)
        assert deep == (whole.num_parameters, whole.activations)
        assert 0 < whole.activations < 1.01 * whole.peak  # which has no buffers
    # 16 bytes per parameter: 32 GiB on two GPUs that have 20 GiB for them
    gib = 2**30
    assert memory.num_gpus(2 * gib, gib, 24) == 2
    assert memory.num_gpus(2 * gib, 22 * gib, 24) is None
