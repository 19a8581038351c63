"""What the trainer relies on in TRL. A failure here means: read TRL's changes before anything."""

import inspect
from importlib.metadata import version

import torch
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer import grpo_trainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict, use_adapter

from agent_trainers.grpo import StepGRPOTrainer

OVERRIDDEN = {
    "__init__",
    "_set_signature_columns_if_needed",
    "_prepare_inputs",
    "_generate_and_score_completions",
}


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_trl_is_the_minor_version_that_was_tested():
    assert version("trl").split(".")[:2] == ["1", "16"]


def test_no_more_of_trl_is_overridden_than_was_meant():
    own = {name for name, value in vars(StepGRPOTrainer).items() if callable(value)}
    assert {name for name in own if hasattr(GRPOTrainer, name)} == OVERRIDDEN


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


def test_the_loss_takes_advantages_per_token_and_the_mask_of_trained_tokens():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'completion_mask * inputs["tool_mask"]' in source
    assert "if advantages.dim() == 1" in source
    assert 'inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes' in source
    for name in ("old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"):
        assert f'"{name}"' in source


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
