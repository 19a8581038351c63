"""A mixture of experts: its routers' loss is one of the batch, however the batch is cut."""

import dataclasses

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from agent_trainers.trainers import generation
from agent_trainers.trainers.grpo import StepGRPOTrainer
from tests.agent_trainers.gradients import assert_close, gradient, micro_batches

ID = "AgentR1/SyntheticMultiHop-v0"
COEFFICIENT = 0.5


@pytest.fixture
def make_mixture(tokenizer):
    def make(**changes):
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            moe_intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
            num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=COEFFICIENT,
            max_position_embeddings=4096, initializer_range=0.2,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, **changes,
        )  # fmt: skip
        return Qwen3MoeForCausalLM(config)

    return make


@pytest.fixture
def make_trainer(make_mixture, tokenizer, make_config):
    def make(model=None, **changes):
        # The episodes at hand were played by another policy.
        config = make_config(max_logprob_drift=None, **changes)
        return StepGRPOTrainer(
            model or make_mixture(), ID, config, processing_class=tokenizer
        )  # fmt: skip

    return make


@pytest.fixture
def played(tiny_policy, tokenizer, make_config):
    """Trajectories of the embedded policy: random weights would not get past their first turn."""
    trainer = StepGRPOTrainer(tiny_policy, ID, make_config(), processing_class=tokenizer)
    return trainer.rollouts.collect(
        [{"task": i // 4} for i in range(8)], "train", (0, 0)
    ).trajectories


@pytest.fixture
def unrewarded(played):
    """The same without rewards: what is left is the routers' loss."""
    return [
        dataclasses.replace(
            episode,
            transitions=[
                dataclasses.replace(t, reward=0.0, reward_terms={}) for t in episode.transitions
            ],
        )
        for episode in played
    ]


def step_gradient(trainer, trajectories):
    """The gradient of one training step, cut as the trainer cuts it."""
    trainer.rollouts.collectors["train"].collect = lambda specs: trajectories
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    trainer.training_step(trainer.model, [{"task": i // 4} for i in range(8)])
    return torch.cat(
        [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    )  # fmt: skip


def test_the_routers_loss_is_transformers_own_over_the_tokens_that_train(make_trainer, unrewarded):
    trainer = make_trainer()
    ours = gradient(trainer, micro_batches(trainer, unrewarded))
    model, logits = trainer.model, []
    for episode in unrewarded:
        for t in episode.transitions:
            ids = torch.tensor([[*t.prompt_ids, *t.completion_ids]])
            output = model.model(input_ids=ids, output_router_logits=True)
            first = len(t.prompt_ids) - 1  # where the model stands when it writes a token
            logits.append([layer[first:-1] for layer in output.router_logits])
    layers = tuple(torch.cat(parts) for parts in zip(*logits, strict=True))
    loss = COEFFICIENT * load_balancing_loss_func(layers, 8, 2)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    expected = torch.cat([part.flatten() for part in gradients])
    assert expected.abs().max() > 1e-3
    assert_close(ours, expected)
    logged = trainer._metrics["train"]["aux_loss"][-1]
    assert COEFFICIENT * logged == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("merge_steps", [True, False])
@pytest.mark.parametrize("max_tokens", [1, 300])
def test_pieces_and_merging_do_not_change_the_gradient(
    make_trainer, played, merge_steps, max_tokens
):
    whole = step_gradient(make_trainer(max_tokens_per_micro_batch=100_000), played)
    cut = make_trainer(max_tokens_per_micro_batch=max_tokens)
    cut.args.merge_steps = merge_steps
    assert whole.abs().max() > 1e-3
    assert_close(step_gradient(cut, played), whole)


def test_accumulation_and_padding_rows_do_not_change_the_gradient(make_trainer, played):
    whole = make_trainer()
    expected = gradient(whole, micro_batches(whole, played[:7]))
    split = make_trainer(per_device_train_batch_size=2, gradient_accumulation_steps=4)
    batches = micro_batches(split, played[:7])
    assert len(batches) == 4
    assert_close(gradient(split, batches), expected)


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_config_that_asks_for_router_logits_samples_and_trains(
    make_mixture, make_trainer, monkeypatch, has_slots
):
    model = make_mixture(output_router_logits=True)
    if not has_slots:
        monkeypatch.setattr(generation, "can_serve", lambda *_: False)
    trainer = make_trainer(model, max_steps=2)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["sampling/sampling_logp_difference/max"] < 1e-3 for entry in logged)
    assert all(entry["aux_loss"] > 0 for entry in logged)
