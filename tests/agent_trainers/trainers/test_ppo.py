"""The trainer with a critic, on a real model."""

import dataclasses
import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from agent_envs import ConfigurationError
from agent_trainers import TINY_POLICY
from agent_trainers.batching.per_token import credit_masks, sort_by_step
from agent_trainers.trainers.batch_builder import build_batch
from agent_trainers.trainers.ppo import StepPPOTrainer
from agent_trainers.trajectory import StopReason
from tests.agent_trainers import made
from tests.agent_trainers.gradients import TOLERANCE

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def make_trainer(make_trainer):
    return functools.partial(make_trainer, kind=StepPPOTrainer)


def stir(trainer):
    """Give the critic an opinion."""
    torch.manual_seed(0)
    for parameter in trainer.critic.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))


def test_a_value_is_that_of_the_state_before_its_token(make_trainer, played):
    trainer = make_trainer()
    stir(trainer)
    batch = build_batch(trainer, played[:2], {})
    rows, values = batch.rows, trainer.values(batch.tensors)
    transition = played[0].transitions[1]
    with torch.no_grad():
        states = trainer._body()(torch.tensor([transition.prompt_ids])).last_hidden_state
        expected = trainer.critic(states)[0, -1]
    assert values[0, rows[0].is_action.index(True)] != 0
    masks = credit_masks(rows, actions_only=True)
    num_steps = [len(t.transitions) for t in played[:2]]
    step_values = sort_by_step(rows, masks, values.cpu().numpy(), num_steps)
    assert step_values[0][1][0] == pytest.approx(expected.item(), rel=TOLERANCE, abs=TOLERANCE)
    assert len(step_values[0][1]) == len(transition.completion_ids)


def test_truncated_episodes_bootstrap_from_their_last_state_and_others_do_not(make_trainer):
    make_env = lambda: gym.make(ID, max_episode_steps=2)  # noqa: E731
    trainer = make_trainer(env=make_env)
    stir(trainer)
    trainer.train()
    trajectories = trainer.trajectories["train"]
    assert {t.stop_reason for t in trajectories} == {StopReason.TURN_LIMIT, StopReason.ANSWERED}
    values = trainer.bootstrap_values(trajectories)
    for trajectory, value in zip(trajectories, values, strict=True):
        assert (value != 0.0) == (trajectory.stop_reason is StopReason.TURN_LIMIT)
        if trajectory.stop_reason is StopReason.TURN_LIMIT:
            last = trajectory.transitions[-1]
            length = len(last.prompt_ids) + len(last.completion_ids)
            assert trajectory.final_prompt_ids[:length] == [*last.prompt_ids, *last.completion_ids]
            assert len(trajectory.final_prompt_ids) > length  # and what the tool said
    trainer.args.bootstrap_truncated = False
    assert not any(trainer.bootstrap_values(trajectories))


@pytest.mark.parametrize("length", [1024, 1100], ids=["full", "with an observation"])
def test_a_full_context_bootstraps_without_its_first_tokens(
    make_trainer, tmp_path, tokenizer, length
):
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)  # has no position behind its context
    tokenizer.save_pretrained(tmp_path)
    trainer = make_trainer(model=str(tmp_path))
    stir(trainer)
    state = np.random.default_rng(1).integers(5, 50, length).tolist()
    full, kept = (
        made.trajectory(made.transition(), stop_reason=StopReason.TURN_LIMIT, final_prompt_ids=ids)
        for ids in (state, state[-1023:])
    )
    one, other = trainer.bootstrap_values([full, kept])
    assert one == pytest.approx(other, rel=TOLERANCE)
    assert one != 0


@pytest.mark.parametrize("changes", [
    {"beta": 0.1, "gradient_checkpointing": True},
    {"critic_model": str(TINY_POLICY), "num_iterations": 2, "bf16": True},
    {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")},
])  # fmt: skip
def test_policy_and_critic_learn(make_trainer, changes, tmp_path):
    trainer = make_trainer(max_steps=2, **changes)
    weights = [(n, p) for m in (trainer.model, trainer.critic) for n, p in m.named_parameters()]
    before = [p.clone() for _, p in weights]
    trainer.train()
    changed = [not torch.equal(p, old) for (_, p), old in zip(weights, before, strict=True)]
    num_policy = len(list(trainer.model.parameters()))
    assert any(changed[:num_policy])
    assert any(changed[num_policy:])
    if "peft_config" in changes:  # an adapter is trained and the model left alone
        names = [name for name, _ in weights[:num_policy]]
        assert all("lora" in n for n, is_other in zip(names, changed, strict=False) if is_other)
        trainer.save_model(str(tmp_path / "saved"))
        assert (tmp_path / "saved" / "critic.safetensors").exists()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(np.isfinite(entry["critic/value_loss"]) for entry in logs)
    assert "critic/explained_variance" in logs[0]
    assert all(p.grad is None for p in trainer.critic.parameters())


def test_after_an_overflow_of_fp16_policy_and_critic_go_on_and_are_clipped_without_its_scale(
    make_trainer, monkeypatch
):
    trainer = make_trainer(max_steps=3, max_grad_norm=1e-3)
    monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
    monkeypatch.setattr(trainer.accelerator, "native_amp", True)
    trainer.accelerator.scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**127, backoff_factor=2.0**-117
    )
    scales, biases, kept, norms = [], [], [], []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, *_, **__):
            norms.append(torch.stack([p.grad.norm() for p in trainer.critic.parameters()]).norm())

        def on_step_end(self, *_, **__):
            scales.append(trainer.accelerator.scaler.get_scale())
            biases.append(trainer.critic.linear.bias.item())
            kept.extend(p.grad for p in trainer.critic.parameters() if p.grad is not None)

    trainer.add_callback(Note())
    trainer.train()
    assert scales == [2.0**10] * 3  # one step was left out, none after it
    assert biases[0] == 0.0
    assert len(set(biases)) == 3
    assert not kept  # those of the step left out would be stepped with later
    assert norms[1].item() == pytest.approx(1e-3, rel=0.01)


def test_rewards_of_one_role_are_refused(make_trainer, played):
    first, *rest = played[0].transitions
    owned = dataclasses.replace(first, info={**first.info, "reward_owners": {"f1": "solver"}})
    episode = dataclasses.replace(played[0], transitions=[owned, *rest])
    with pytest.raises(ConfigurationError, match="rewards of one role"):
        build_batch(make_trainer(), [episode, *played[1:]], {})


def test_a_second_training_continues_without_whitening(make_trainer):
    trainer = make_trainer(estimator_kwargs='{"whiten": false}')
    trainer.train()
    scale = max(np.abs(a).max() for a in trainer.last_batch.advantages)
    trainer.args.max_steps = 2
    trainer.train()
    assert trainer.state.global_step == 2
    assert scale < 1.5  # returns are at most 1.2; whitened, the largest is above 2


def test_the_main_process_alone_saves_the_critic(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(save_strategy="no")
    monkeypatch.setattr(type(trainer.args), "should_save", False)
    trainer._save(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "critic.safetensors").exists()
