"""The trainer on a real model: gradients, TRL's features, refusals."""

import dataclasses
import json
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from trl.trainer import utils

from agent_envs import ConfigurationError, UnknownNameError
from agent_trainers.batching import micro_batch, shared_prefix
from agent_trainers.policies import local
from agent_trainers.trainers import scorer
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.gradients import (
    TOLERANCE,
    assert_close,
    each_by_itself,
    gradient,
    micro_batches,
)
from tests.agent_trainers.trainers.test_own_functions import (
    above_the_median,
    above_the_value,
    one_for_all,
)

ID = "AgentR1/SyntheticMultiHop-v0"


def test_sharing_prompts_does_not_change_the_gradient(make_trainer, played, monkeypatch):
    shared = []
    forward = scorer.forward_shared
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_SHARE", 0.0)  # the policy's states are short
    monkeypatch.setattr(scorer, "forward_shared", lambda *a: shared.append(a[3]) or forward(*a))
    trainer = make_trainer(beta=0.1, num_iterations=2)
    batch = micro_batches(trainer, played)
    together = gradient(trainer, batch)
    assert {len(groups.firsts) for groups in shared} == {2}  # two groups of four episodes
    logged = trainer._metrics["train"]["entropy"][-1]
    monkeypatch.setattr(scorer, "can_share", lambda model: False)
    apart = gradient(trainer, micro_batches(trainer, played))
    assert apart.abs().max() > 1e-3
    assert_close(together, apart)
    assert trainer._metrics["train"]["entropy"][-1] == pytest.approx(logged, rel=1e-5)


@pytest.mark.parametrize("shares", [False, True])
def test_the_head_scores_the_trained_tokens_only(make_trainer, played, monkeypatch, shares):
    sizes, kernel = [], utils._ChunkedLogProbFunction.apply
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_SHARE", 0.0 if shares else 1.0)
    trainer = make_trainer()
    (batch,) = micro_batches(trainer, played)
    (rows,) = trainer.scorer.micro_batches(batch, is_training=True)
    monkeypatch.setattr(
        utils._ChunkedLogProbFunction, "apply", lambda *a: sizes.append(len(a[0])) or kernel(*a)
    )
    trainer.scorer.score(trainer.model, rows)
    trained, tokens = (int(rows.forwarded[f"{n}_mask"].sum()) for n in ("tool", "completion"))
    assert sizes == [trained]
    assert trained < tokens  # observations stand between actions


def test_equal_rows_go_through_the_model_once_and_keep_their_weight(
    make_trainer, played, monkeypatch
):
    first = played[0]
    twins = [*played[:6], first, first]  # of another group, with other advantages
    twins[6:] = [dataclasses.replace(twin, group_id=played[4].group_id) for twin in twins[6:]]
    trainer = make_trainer(max_logprob_drift=None)
    (batch,) = micro_batches(trainer, twins)
    (together,) = trainer.scorer.micro_batches(batch, is_training=True)
    num_different = len({tuple(row) for row in batch["completion_ids"].tolist()})
    assert len(together.forwarded["completion_ids"]) == num_different < 8
    once = gradient(trainer, [batch])
    monkeypatch.setattr(micro_batch, "group_rows", each_by_itself)
    (apart,) = trainer.scorer.micro_batches(batch, is_training=True)
    assert len(apart.forwarded["completion_ids"]) == 8
    assert once.abs().max() > 1e-3
    assert_close(gradient(trainer, [batch]), once)


def test_micro_batches_under_a_token_budget_do_not_change_a_training_step(make_trainer, played):
    def gradients(**changes):
        trainer = make_trainer(per_device_train_batch_size=8, **changes)
        trainer.args.merge_steps = False
        trainer.rollouts.collectors["train"].collect = lambda specs: played
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.training_step(trainer.model, [{"task": i // 4} for i in range(8)])
        return loss, torch.cat([p.grad.flatten() for p in trainer.model.parameters()]), trainer

    loss, expected, _ = gradients(max_tokens_per_micro_batch=100_000)
    assert expected.abs().max() > 1e-3
    for max_tokens, max_share in ((1, 0.0), (200, 0.4)):
        split_loss, split, trainer = gradients(max_tokens_per_micro_batch=max_tokens)
        assert_close(split, expected)
        assert split_loss.item() == pytest.approx(loss.item(), abs=TOLERANCE)
        assert trainer._step == 1
        assert trainer._metrics["train"]["rows/padding_share"][-1] <= max_share


def test_in_float32_old_log_probabilities_are_those_of_sampling(make_trainer, played):
    old = {}
    for limit in (0.2, None):  # without the check of drift they are computed again
        trainer = make_trainer(max_logprob_drift=limit, num_iterations=2)
        (batch,) = micro_batches(trainer, played)
        old[limit] = batch["old_per_token_logps"] * batch["tool_mask"]
        is_sampled = batch["old_per_token_logps"].equal(batch["sampling_per_token_logps"])
        assert is_sampled == (limit is not None)
    torch.testing.assert_close(old[0.2], old[None], rtol=0.0, atol=1e-4)


def test_trained_tokens_are_the_sampled_ones_with_their_log_probabilities(make_trainer, played):
    trainer = make_trainer()
    (batch,) = micro_batches(trainer, played)
    pairs = zip(batch["completion_ids"], batch["tool_mask"].bool(), strict=True)
    trained = sorted(row[mask].tolist() for row, mask in pairs)
    assert trained == sorted([i for t in e.transitions for i in t.completion_ids] for e in played)
    recomputed = trainer.scorer.logprobs(trainer.model, batch, is_training=True)
    difference = (recomputed - batch["sampling_per_token_logps"]) * batch["tool_mask"]
    assert difference.abs().max() < 1e-4
    # samples of an episode do not depend on the other episodes of its batch
    spec = trainer.rollouts.spec({"task": 0}, 3, "train", (0, 0))
    (alone,) = trainer.rollouts.collectors["train"].collect([spec])
    tokens = [[t.completion_ids for t in each.transitions] for each in (alone, played[3])]
    assert tokens[0] == tokens[1]
    # without the loss mask, observations have a gradient
    with_mask = gradient(trainer, [batch])
    unmasked = make_trainer(loss_mask=False)
    (batch,) = micro_batches(unmasked, played)
    assert batch["tool_mask"].sum() > batch["action_mask"].sum() > 0
    assert (gradient(unmasked, [batch]) - with_mask).abs().max() > 1e-3


def test_settings_of_trl_stay_usable(make_trainer):
    trainer = make_trainer(
        max_steps=2, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, bf16=True,
        gradient_checkpointing=True, steps_per_generation=2, top_p=0.9, top_k=20, temperature=0.7,
        mask_truncated_completions=True,
    )  # fmt: skip
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert not all(map(torch.equal, before, trainer.model.parameters()))


def test_a_run_logs_its_terms_closes_its_environments_and_saves_a_model_for_transformers(
    make_trainer, tmp_path
):
    is_open = []

    class Watched(gym.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            is_open.append(self)

        def close(self):
            is_open.remove(self)
            super().close()

    schedules = json.dumps({"new_gold_passage": {"kind": "linear", "start": 1.0, "end": 0.0}})
    trainer = make_trainer(
        env=lambda: Watched(gym.make(ID)), max_steps=2, reward_schedules=schedules,
        eval_dataset=Dataset.from_dict({"task": list(range(6))}),
    )  # fmt: skip
    trainer.train()
    assert not is_open
    first, second = [e for e in trainer.state.log_history if "loss" in e]
    assert {"success", "step_time", "metrics/f1", "episodes/answered",
            "time/generate_seconds"} <= set(first)  # fmt: skip
    for entry, factor in ((first, 1.0), (second, 0.5)):
        assert entry["reward_factor/new_gold_passage"] == factor
        terms = entry["rewards/exact_match"] + entry["rewards/new_gold_passage"]
        assert entry["reward"] == pytest.approx(terms)
        assert entry["reward"] == pytest.approx(entry["reward/outcome"] + entry["reward/process"])
        assert entry["step_time"] >= entry["time/rollout_seconds"]
    played = trainer.trajectories["train"]
    terms = [t.reward_terms["new_gold_passage"] for e in played for t in e.transitions]
    mean = sum(terms) / len(played)
    assert second["rewards/new_gold_passage"] == pytest.approx(0.5 * mean)
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    assert all(map(torch.equal, saved.parameters(), trainer.model.parameters()))
    evaluated = trainer.evaluate()
    trainer.state.global_step += 1
    again = trainer.evaluate()
    assert not is_open
    for name in ("eval_success", "eval_reward"):
        assert evaluated[name] == again[name]
    episodes = trainer.trajectories["eval"]  # of the last evaluation only
    assert len(episodes) == len({t.task_id for t in episodes}) == 6
    # of batches of 4 and 2
    assert evaluated["eval_reward"] == pytest.approx(np.mean([t.return_ for t in episodes]))
    trainer.num_generations_eval = 3
    with pytest.raises(ConfigurationError, match="so that a batch holds whole groups"):
        trainer.evaluate()


def test_steps_since_sampling_count_where_batches_and_optimiser_steps_overlap(make_trainer):
    trainer = make_trainer(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, steps_per_generation=2,
        max_steps=2, learning_rate=1e-2,
    )  # fmt: skip
    trainer.train()  # the drift of the first update is not one of sampling
    first, second = (e for e in trainer.state.log_history if "loss" in e)
    assert first["sampling/staleness"] == 0
    # of three micro-batches, one was sampled with the batch before
    assert second["sampling/staleness"] == pytest.approx(1 / 3)


def test_divergence_is_weighed_with_the_tokens_own_bounded_ratio(make_trainer, played):
    settings = {"beta": 0.1, "num_iterations": 2, "importance_sampling_level": "step"}
    trainer = make_trainer(use_bias_correction_kl=True, **settings)
    (batch,) = micro_batches(trainer, played)
    mask = batch["action_mask"]
    batch["advantages"] = torch.zeros_like(batch["advantages"])  # what is left is the divergence
    drift = 0.03 + 0.5 * torch.rand(mask.shape, generator=torch.Generator().manual_seed(0))
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] - 3 * drift
    batch["ref_per_token_logps"] = batch["sampling_per_token_logps"] - drift
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, batch)
    ratio = torch.exp(3 * drift).clamp(max=3.0)
    divergence = torch.exp(-drift) + drift - 1
    expected = 0.1 * (divergence * ratio * mask * batch["loss_weights"]).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_states_that_do_not_fit_end_their_episode(make_trainer):
    trainer = make_trainer(max_prompt_length=40)
    trainer.train()
    reasons = {t.stop_reason for t in trainer.trajectories["train"]}
    assert StopReason.CONTEXT_OVERFLOW in reasons
    with pytest.raises(ConfigurationError, match="longer than max_prompt_length"):
        make_trainer(max_prompt_length=2).train()


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss_type": "bnpo"}, "loss_type"),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high"),
    ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 2.0}, "delta and epsilon do nothing"),
    ({"scale_rewards": "groups"}, "Did you mean 'group'"),
    ({"estimator_kwargs": '{"scale": "nnoe"}'}, "Unknown scale 'nnoe'"),
    ({"vllm_structured_outputs_regex": "x"}, "tool format"),
    ({"rollout": "async", "vllm_importance_sampling_correction": False}, "older weights"),
    ({"lam": 2.0}, "lam must be in"),
    ({"estimator_kwargs": '{"step_weight": 0.5}'}, "step_weight"),
    ({"advantage_estimator": "grpo-step"}, "Did you mean 'grpo_step'"),
    ({"advantage_estimator": "rloo", "scale_rewards": "none"}, "scale_rewards does nothing"),
    ({"reward_schedules": "{"}, "reward_schedules"),
    ({"vllm_importance_sampling_mode": "sequence"}, "Did you mean 'sequence_mask'"),
    ({"rollout": "asynch"}, "Did you mean 'async'"),
    ({"max_staleness": 2}, "max_staleness=2 does nothing with rollout='sync'"),
    ({"loss_denominator": "row"}, "Unknown loss_denominator 'row'. Available:"),
    ({"advantage_estimator": lambda episodes: []}, "has no import path"),
    ({"advantage_estimator": above_the_value}, "needs a critic"),
    ({"advantage_estimator": above_the_median, "lam": 0.5}, "lam does nothing"),
    ({"advantage_estimator": "no_such_module:f"}, "cannot be imported"),
    ({"advantage_estimator": f"{__name__}:no_such_function"}, "cannot be imported"),
    ({"advantage_estimator": ":"}, "cannot be imported"),
])  # fmt: skip
def test_unsupported_settings_are_refused_by_name(make_config, changes, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        make_config(**changes)


def test_scaling_is_switched_as_in_trl(make_config):
    given = ("False", "true", False, "batch")
    scales = [make_config(scale_rewards=value).scale_rewards for value in given]
    assert scales == ["none", "group", "none", "batch"]


TWO, ONE = {"id": ID, "name": "two"}, {"id": ID, "name": "one", "kwargs": {"hops": 1}}
MIXED = {"env": [TWO, ONE], "per_device_train_batch_size": 16}
CRITIC = {"kind": StepPPOTrainer}


@pytest.mark.parametrize(("changes", "message"), [
    ({"reward_schedules": '{"new_gold_pasage": {"kind": "linear"}}'}, "Did you mean 'new_go"),
    ({"eval_dataset": Dataset.from_dict({"prompt": ["x"]})}, "column 'task'"),
    ({"max_steps": -1}, "max_steps"),
    ({"env": gym.Env()}, "env, entry 1: id"),
    ({"env": lambda: gym.make(ID, context={"name": "window", "turns": 1}),
      "importance_sampling_level": "sequence"}, "needs whole trajectories in a row"),
    ({"advantage_estimator": one_for_all}, "one_for_all returned 1 arrays for 8 episodes"),
    ({"max_extra_groups": -1}, "at least 0"),
    ({"curriculum": "levels"}, "needs several environments"),
    (MIXED | {"env": [{"id": ID, "tasks": [0]}, TWO, TWO]}, "have the name 'two'"),
    (MIXED | {"env": [TWO, ONE | {"weight": 2}], "curriculum": "levels"}, "weight does nothing"),
    (MIXED | {"shuffle_dataset": False}, "shuffle_dataset=False does nothing"),
    (MIXED | {"eval_dataset": Dataset.from_dict({"task": [1]})}, "needs a column 'env'"),
    (MIXED | {"eval_dataset": Dataset.from_list([{"env": "tow", "task": 1}])},
     "needs a column 'env'"),
    (MIXED | {"eval_envs": [{"id": ID, "weight": 2}]}, "weight does nothing"),
    (MIXED | {"eval_envs": [{"id": ID, "name": "one", "kwargs": {"hops": 3}}]}, "'one'"),
    (CRITIC | {"advantage_estimator": "grpo"}, "uses no critic"),
    (CRITIC | {"value_coef": 0.0}, "value_coef"),
    (CRITIC | {"critic_warmup_steps": -1}, "critic_warmup_steps"),
    (CRITIC | {"critic_model": "/nowhere"}, "critic_model=/nowhere"),
    (CRITIC | {"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers="),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(make_trainer, changes, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        make_trainer(**changes).train()


@pytest.mark.parametrize("kind", ["adapter", "attention"])
def test_neither_dropout_nor_the_models_own_settings_reach_sampling(
    make_trainer, model, kind, monkeypatch
):
    settings = {"num_iterations": 2, "beta": 0.1, "max_steps": 2, "learning_rate": 0.0}
    if kind == "adapter":
        settings["peft_config"] = LoraConfig(
            r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.5,
            init_lora_weights=False,
        )  # fmt: skip
    else:  # transformers generates batch by batch, as for models that slots do not support
        monkeypatch.setattr(local, "can_serve", lambda *_: False)
        model.generation_config.no_repeat_ngram_size = 1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
    trainer = make_trainer(model=model, **settings)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0]["sampling/sampling_logp_difference/max"] < 1e-4
    assert (trainer.current_logprobs() == trainer.current_logprobs()).all()
    # The pass that trains drops out, as TRL's does: other tokens each time, at learning rate 0.
    assert logged[0]["entropy"] != logged[1]["entropy"]
    if kind == "attention":
        assert trainer.model.generation_config.no_repeat_ngram_size == 1


def test_a_sharded_model_returns_scores_and_sums_gradients_in_float32(monkeypatch):
    def create(trainer):
        policy = MixedPrecisionPolicy(*[torch.bfloat16] * 3)
        plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=policy)
        trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create)
    trainer = StepGRPOTrainer.__new__(StepGRPOTrainer)
    trainer.create_accelerator_and_postprocess()
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    assert policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)
