"""Names, signatures and behaviour of TRL and transformers that the trainers rely on."""

import inspect
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from agent_trainers import TINY_POLICY, StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import StepPPOTrainer
from tests.agent_trainers.gradients import assert_close

LIBRARIES = ("trl", "transformers")
# Overridden methods, with their parameters in the library
OVERRIDDEN = {
    "_clip_grad_norm": "model",
    "_compute_loss": "model inputs",
    "_finalize_training": "trial num_train_samples start_time",
    "_generate_and_score_completions": "inputs",
    "_get_output_dir": "trial",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_load_rng_state": "checkpoint",
    "_prepare_inputs": "generation_batch",
    "_push_from_checkpoint": "checkpoint_folder",
    "_run_epoch": "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
    "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained "
    "steps_trained_in_current_epoch",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial",
    "_save_rng_state": "output_dir",
    "_set_signature_columns_if_needed": "",
    "create_accelerator_and_postprocess": "",
    "create_optimizer": "model",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "get_batch_samples": "epoch_iterator num_batches device",
    "save_model": "output_dir _internal_call",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "training_step": "model inputs num_items_in_batch",
}
# Private attributes that the trainers read or set
USED = (
    "_buffered_inputs", "_generate_single_turn", "_globalstep_last_logged", "_initial_global_step",
    "_is_vlm", "_logs", "_metrics", "_step", "_tokenizer", "_total_loss_scalar", "_tr_loss",
)  # fmt: skip


def library_methods():
    """Methods of the libraries that the trainers override, by name."""
    found = {}
    for kind in StepPPOTrainer.__mro__:
        if kind.__module__.split(".")[0] == "agent_trainers":
            for name, value in vars(kind).items():
                bases = [
                    base
                    for base in StepPPOTrainer.__mro__
                    if base.__module__.split(".")[0] in LIBRARIES and name in vars(base)
                ]
                if inspect.isfunction(value) and name != "__init__" and bases:
                    found[name] = vars(bases[0])[name]
    return found


def test_overridden_methods_exist_with_the_signatures_that_were_tested():
    found = {
        name: " ".join(list(inspect.signature(method).parameters)[1:])
        for name, method in library_methods().items()
    }
    # a new name is an override without an entry, or a method of ours that a library now has, too
    assert found == OVERRIDDEN


def test_private_names_that_the_trainers_use_exist():
    source = "\n".join(
        inspect.getsource(kind)
        for kind in StepGRPOTrainer.__mro__
        if kind.__module__.split(".")[0] in LIBRARIES
    )
    assert [name for name in USED if f"self.{name}" not in source and name not in source] == []
    assert hasattr(GradientState, "_set_sync_gradients")
    assert "self._models" in inspect.getsource(Accelerator.__init__)


@pytest.mark.parametrize(
    "changes",
    [
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"loss_type": "cispo", "epsilon_high": 2.0},
        {"delta": 1.5, "epsilon_high": 0.28},
        {"importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_loss_equals_that_of_trl_where_both_have_it(make_trainer, changes):
    """TRL's ratio per row is ours per trajectory; its denominator is ours by token."""
    trainer = make_trainer(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, num_iterations=2, **changes
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
    assert_close(*gradients)
    logged = trainer._metrics["train"]
    assert logged["entropy"][0] == pytest.approx(logged["entropy"][1])
    if not trainer.args.use_bias_correction_kl and "beta" in changes:
        assert logged["kl"][0] == pytest.approx(logged["kl"][1])


def test_names_that_trl_uses_and_transformers_renamed_do_not_warn(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(TINY_POLICY)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StepGRPOConfig(str(tmp_path))
        with disable_gradient_checkpointing(model):
            pass
    assert [warning for warning in caught if warning.category is FutureWarning] == []
