"""What the trainer relies on in TRL. A failure here means: read TRL's changes before anything."""

import inspect
from importlib.metadata import version

import pytest
import torch
from transformers import Trainer
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler, shuffle_sequence_dict, split_tensor_dict, use_adapter

from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer
from agent_trainers.trainers.resumable import ResumableTrainer

OVERRIDDEN = {
    "__init__",
    "_set_signature_columns_if_needed",
    "training_step",
    "_prepare_inputs",
    "_generate_and_score_completions",
    "_compute_loss",
}
OVERRIDDEN_FOR_THE_CRITIC = {
    "__init__",
    "create_optimizer",
    "_clip_grad_norm",
    "_save",
    "_load_from_checkpoint",
}
OVERRIDDEN_FOR_RESUMING = {
    "train",
    "log",
    "save_model",
    "_finalize_training",
    "_get_output_dir",
    "_issue_warnings_after_load",
    "_load_rng_state",
    "_push_from_checkpoint",
    "_run_epoch",
    "_save_checkpoint",
    "_save_rng_state",
}


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_trl_is_the_minor_version_that_was_tested():
    assert version("trl").split(".")[:2] == ["1", "16"]


def test_no_more_of_trl_is_overridden_than_was_meant():
    for kind, expected in (
        (StepGRPOTrainer, OVERRIDDEN),
        (StepPPOTrainer, OVERRIDDEN_FOR_THE_CRITIC),
        (ResumableTrainer, OVERRIDDEN_FOR_RESUMING),
    ):
        own = {name for name, value in vars(kind).items() if callable(value)}
        assert {name for name in own if hasattr(GRPOTrainer, name)} == expected


def test_the_methods_that_are_called_or_overridden_take_what_they_took():
    assert parameters(GRPOTrainer._prepare_inputs) == ["self", "generation_batch"]
    assert parameters(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert parameters(GRPOTrainer._generate_single_turn)[:5] == [
        "self", "prompt_ids", "images", "multimodal_fields", "num_generations",
    ]  # fmt: skip
    assert parameters(GRPOTrainer._get_per_token_logps_and_entropies)[:6] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size",
    ]  # fmt: skip
    assert {
        "gather_deepspeed3_params",
        "generation_kwargs",
        "gradient_checkpointing_kwargs",
    } <= set(parameters(unwrap_model_for_generation))
    assert len(parameters(disable_gradient_checkpointing)) == 2
    assert parameters(use_adapter) == ["model", "adapter_name"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "cispo", "epsilon_high": 2.0},
        {"delta": 1.5, "epsilon_high": 0.28},
        {"importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_our_loss_is_trls_where_trl_has_it(tiny_policy, tokenizer, make_config, changes):
    """TRL's ratio per row is ours per trajectory; its denominator is ours by token."""
    trainer = StepGRPOTrainer(
        tiny_policy,
        "AgentR1/SyntheticMultiHop-v0",
        make_config(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            num_iterations=2,
            **changes,
        ),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 2
    batch = trainer._prepare_inputs([{"task": i // 4} for i in range(8)])
    with torch.no_grad():  # so that ratios differ from 1 and some are clipped
        for parameter in trainer.model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    losses, gradients = [], []
    trained = sum(b["tool_mask"].sum() for b in trainer._buffered_inputs)
    for compute in (GRPOTrainer._compute_loss, StepGRPOTrainer._compute_loss):
        trainer.model.zero_grad()
        trls = {"num_items_in_batch": trained} if compute is GRPOTrainer._compute_loss else {}
        loss = compute(trainer, trainer.model, batch | trls)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(*gradients, atol=1e-6)
    logged = trainer._metrics["train"]
    assert logged["entropy"][0] == pytest.approx(logged["entropy"][1])
    if not trainer.args.use_bias_correction_kl and "beta" in changes:
        assert logged["kl"][0] == pytest.approx(logged["kl"][1])


def test_a_training_step_prepares_its_inputs_and_takes_one_gradient():
    source = inspect.getsource(Trainer.training_step)
    assert source.count("self._prepare_inputs(inputs)") == 1
    assert source.count("self.accelerator.backward(loss") == 1
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)
    assert "super().training_step(" in inspect.getsource(GRPOTrainer.training_step)


def test_the_loss_is_what_compute_loss_asks_for():
    source = inspect.getsource(GRPOTrainer.compute_loss)
    assert "self._compute_loss(model, inputs)" in source


def test_a_critic_finds_the_hooks_it_needs_in_the_trainer():
    assert parameters(Trainer.create_optimizer) == ["self", "model"]
    assert parameters(Trainer._clip_grad_norm) == ["self", "model"]
    assert parameters(Trainer._save) == ["self", "output_dir", "state_dict"]
    assert parameters(Trainer._load_from_checkpoint) == ["self", "resume_from_checkpoint", "model"]
    assert "self._clip_grad_norm(model)" in inspect.getsource(Trainer)


def test_checkpoints_are_written_and_read_where_resuming_relies_on_it():
    save = inspect.getsource(Trainer._save_checkpoint)
    assert save.count("self._get_output_dir(trial=trial)") == 1
    for call in ("self._save_rng_state(output_dir)", "rotate_checkpoints(\n", "output_dir=run_dir"):
        assert call in save
    assert "self._get_output_dir" in inspect.getsource(GRPOTrainer._save_checkpoint)  # entropy only
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.count("self._load_rng_state(resume_from_checkpoint)") == 2
    assert {"epoch", "epochs_trained", "resume_from_checkpoint", "train_dataloader"} <= set(
        parameters(Trainer._run_epoch)
    )
    loop = inspect.getsource(Trainer._inner_training_loop)
    for state in ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged"):
        assert f"self.{state} = " in loop  # begun anew before an epoch, and restored in it
    assert "self._initial_global_step" in inspect.getsource(Trainer._finalize_training)
    assert "generator" in inspect.getsource(RepeatSampler)


def test_a_generation_batch_is_shuffled_and_split_by_rows_and_its_tail_floored():
    batch = {"x": torch.arange(10).reshape(5, 2), "n": torch.tensor(3)}
    assert sorted(shuffle_sequence_dict(batch)["x"].tolist()) == batch["x"].tolist()
    chunks = split_tensor_dict(batch, 2)
    assert [chunk["x"].tolist() for chunk in chunks] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(chunk["n"] == 3 for chunk in chunks)


def test_generation_happens_where_inputs_are_prepared():
    source = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._generate_and_score_completions(generation_batch)" in source
    assert "self.args.steps_per_generation * self.num_iterations" in source


def test_a_rows_columns_are_cut_to_the_signature_columns():
    assert "_signature_columns" in inspect.getsource(GRPOTrainer._set_signature_columns_if_needed)


def test_trl_computes_the_reward_only_where_it_is_overridden():
    source = inspect.getsource(grpo_trainer)
    assert source.count("self._calculate_rewards(") == 1
    assert "self._calculate_rewards(" in inspect.getsource(
        GRPOTrainer._generate_and_score_completions
    )
