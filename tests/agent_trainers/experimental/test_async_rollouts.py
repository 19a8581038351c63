"""Our episodes in TRL's asynchronous trainer, with a stand-in for the vLLM server.

Real are TRL's trainer, its queue, its packing and its loss, our worker, and the HTTP between worker
and server. Its attention kernel, which runs on GPUs alone, is replaced by the same in plain torch.
"""

import types
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import agent_envs  # noqa: F401 - registers the environments
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.experimental.async_rollouts import EnvironmentRolloutWorker, step_samples
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from tests.agent_trainers.vllm_stand_in import VLLMStandIn, serving

MAX_NEW_TOKENS = 24


def make_env():
    return gym.make("AgentR1/SyntheticMultiHop-v0")


pytest.importorskip("openai", reason="the extra openai is not installed")


@pytest.fixture(autouse=True)
def _experimental(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


@pytest.fixture
def stand_in(tiny_policy, tokenizer):
    stand_in = VLLMStandIn(tiny_policy, [tokenizer.eos_token_id])
    with serving(stand_in) as url:
        stand_in.url = url
        yield stand_in


@pytest.fixture
def policy(stand_in, tokenizer):
    settings = SamplingSettings(
        max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=(tokenizer.eos_token_id,)
    )
    policy = VLLMServerPolicy(
        stand_in.url, ChatRenderer(tokenizer), settings, max_concurrency=8, max_retries=1
    )
    yield policy
    policy.close()


def play(policy, num_episodes=4):
    specs = [
        EpisodeSpec(task=7, seed=7, group_id="0", rng=np.random.default_rng(i))
        for i in range(num_episodes)
    ]
    return Rollout(make_env, policy).collect(specs)


def test_every_step_is_a_sample_with_its_own_advantage(policy):
    trajectories = play(policy)
    # what a server samples depends on the episodes' generators alone
    assert [t.transitions for t in trajectories] == [t.transitions for t in play(policy)]
    assert len({tuple(step.action for step in t.transitions) for t in trajectories}) > 1
    advantages = estimate("grpo_step", trajectories)
    for trajectory, values in zip(trajectories, advantages, strict=True):
        samples = step_samples(trajectory, values, 2)
        assert [sample.advantage for sample in samples] == values.tolist()
        for sample, step in zip(samples, trajectory.transitions, strict=True):
            assert sample.input_ids.tolist() == [*step.prompt_ids, *step.completion_ids]
            trained = sample.input_ids[sample.completion_mask == 1]
            assert trained.tolist() == step.completion_ids
            assert sample.old_log_probs[sample.completion_mask == 1] == pytest.approx(step.logprobs)
            assert (sample.group_id, sample.model_version) == (0, 2)
        assert samples[0].metrics["reward"] == pytest.approx(sum(trajectory.rewards))
        assert all(not sample.metrics for sample in samples[1:])


def attention(query, key, value, ends_q, ends_k, *_, softmax_scale, causal, window_size):
    """``flash_attn_varlen_func`` in plain torch: causal, aligned at the end of each segment."""
    assert causal
    assert window_size == (-1, -1)
    groups = query.size(1) // key.size(1)
    parts = []
    for i in range(len(ends_q) - 1):
        q = query[ends_q[i] : ends_q[i + 1]].transpose(0, 1)
        k, v = (
            x[ends_k[i] : ends_k[i + 1]].repeat_interleave(groups, 1).transpose(0, 1)
            for x in (key, value)
        )
        mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        part = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale
        )
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def test_trls_asynchronous_trainer_learns_from_our_steps(
    stand_in, policy, tokenizer, tiny_policy, tmp_path, monkeypatch
):
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    kernel = types.SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr("trl.experimental.async_grpo.packing._flash_attn", lambda: kernel)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "CPU")
    worker = EnvironmentRolloutWorker(
        make_env, policy, range(100), num_generations=4, num_groups_at_once=1
    )

    def send(iterator):
        parameters = dict(stand_in.model.named_parameters())
        with stand_in._lock, torch.no_grad():
            for name, tensor in iterator:
                parameters[name].copy_(tensor)

    transfer = mock.Mock()  # gives the stand-in the trainer's weights, as NCCL would
    transfer.send_weights.side_effect = send
    trainer = AsyncGRPOTrainer(
        model=tiny_policy,
        args=AsyncGRPOConfig(
            str(tmp_path / "run"), max_steps=2, num_generations=4, token_budget=768,
            max_completion_length=MAX_NEW_TOKENS, vllm_server_base_url=stand_in.url,
            learning_rate=1e-2, dtype="float32", use_cpu=True, bf16=False, max_staleness=3,
            gradient_checkpointing=False, dataloader_pin_memory=False, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True,
        ),
        train_dataset=[],
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=transfer,
    )  # fmt: skip
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(log) == 2
    assert log[0]["ratio"] == pytest.approx(1.0, abs=0.01)  # what was sampled is what is trained
    assert log[0]["sample/staleness_max"] == 0
    assert log[0]["batch/packing_ratio"] > 1.5  # steps of an episode, episodes of a group
    assert {"reward", "success"} <= set(log[-1])
    start = AutoModelForCausalLM.from_pretrained(tiny_policy).state_dict()
    weights = trainer.model.state_dict()
    assert max((weights[name] - start[name]).abs().max() for name in start) > 1e-3
    for name, parameter in stand_in.model.named_parameters():  # the server follows
        assert torch.equal(parameter, weights[name])
    assert transfer.send_weights.call_count >= 2
    assert not worker._thread.is_alive()


def test_a_server_that_fails_is_reported_to_the_trainer(stand_in, policy, monkeypatch):
    def fail(body):
        raise AssertionError("out of memory")

    monkeypatch.setattr(stand_in, "_complete", fail)
    worker = EnvironmentRolloutWorker(
        make_env, policy, [1], num_generations=2, num_groups_at_once=1
    )
    worker.start()
    worker._thread.join(timeout=60)
    with pytest.raises(RuntimeError, match="APIConnectionError"):
        worker.check_health(stale_after_s=60)
    worker.stop()
