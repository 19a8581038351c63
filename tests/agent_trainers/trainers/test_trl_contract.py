"""What the trainers rely on in TRL. A failure here means: read TRL's changes before anything."""

import inspect

import pytest
import torch
from accelerate.state import GradientState
from transformers import Trainer
from trl import GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from agent_trainers.trainers.grpo import StepGRPOTrainer
from tests.agent_trainers.gradients import assert_close
from tests.agent_trainers.trainers import trl_contract
from tests.agent_trainers.trainers.trl_contract import Libraries

HOW = "Regenerate the table: python -m tests.agent_trainers.trainers.trl_contract"


@pytest.fixture(scope="module")
def table():
    return trl_contract.read_table()


def test_what_we_rely_on_in_trl_is_as_in_versions_that_were_tested(table):
    changes = trl_contract.changes(table, Libraries())
    if changes:
        pytest.fail(
            f"{trl_contract.versions()}: the table knows {'; '.join(table['versions'])}. "
            f"Read what has changed, adapt the trainers, and add it. {HOW}\n" + "\n".join(changes)
        )


def test_the_table_has_every_name_of_trl_that_our_code_touches(table):
    touched, unknown = trl_contract.touched_names(Libraries())
    assert unknown == {}, "private names that neither we nor the libraries define"
    missing = {name: files for name, files in touched.items() if name not in table["names"]}
    assert missing == {}, HOW
    assert set(table["names"]) <= set(touched), HOW


# Three upgrades


def test_a_private_method_that_was_renamed_is_named(monkeypatch, table):
    method = GRPOTrainer._prepare_inputs
    monkeypatch.delattr(GRPOTrainer, "_prepare_inputs")
    monkeypatch.setattr(GRPOTrainer, "_prepare_batch", method, raising=False)
    (change,) = [c for c in trl_contract.changes(table, Libraries()) if "is gone" in c]
    assert change.startswith("trl:GRPOTrainer._prepare_inputs is gone")
    assert "agent_trainers/trainers/" in change


def test_a_signature_that_changed_is_named(monkeypatch, table):
    def _save_rng_state(self, output_dir, process):
        return original(self, output_dir)

    original = Trainer._save_rng_state
    monkeypatch.setattr(Trainer, "_save_rng_state", _save_rng_state)
    (change,) = trl_contract.changes(table, Libraries())
    assert change.startswith("transformers:Trainer._save_rng_state ")
    assert "signature: (self, output_dir, process) instead of (self, output_dir)" in change


def test_a_body_that_changed_is_named(monkeypatch, table):
    def _set_sync_gradients(self, sync_gradients):
        self.sync_gradients = not sync_gradients

    monkeypatch.setattr(GradientState, "_set_sync_gradients", _set_sync_gradients)
    (change,) = trl_contract.changes(table, Libraries())
    assert change.startswith("accelerate.state:GradientState._set_sync_gradients has another body")
    assert "agent_trainers/trainers/" in change


def test_a_state_that_is_set_elsewhere_and_a_call_that_is_made_otherwise_are_named(
    monkeypatch, table
):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._step = 0
        return self._compute_loss(model, inputs, return_outputs)

    monkeypatch.setattr(GRPOTrainer, "compute_loss", compute_loss)
    changes = "\n".join(trl_contract.changes(table, Libraries()))
    assert "trl:GRPOTrainer.compute_loss has another body" in changes
    assert "trl:GRPOTrainer._step is assigned otherwise in compute_loss" in changes
    assert (
        "trl:GRPOTrainer._compute_loss is no longer called in GRPOTrainer.compute_loss" in changes
    )
    assert "(model, inputs, return_outputs)" in changes


def test_comments_docstrings_and_layout_are_no_change(monkeypatch, table):
    # fmt: off
    def _set_signature_columns_if_needed(self):
        """Another sentence."""
        # a comment
        if (self._signature_columns
            is None):
            self._signature_columns = ["prompt", "image", "images"]
    # fmt: on

    source = inspect.getsource(GRPOTrainer._set_signature_columns_if_needed)
    assert 'self._signature_columns = ["prompt", "image", "images"]' in source
    monkeypatch.setattr(
        GRPOTrainer, "_set_signature_columns_if_needed", _set_signature_columns_if_needed
    )
    assert trl_contract.changes(table, Libraries()) == []


def test_a_name_of_ours_that_trl_begins_to_use_is_named(monkeypatch, table):
    methods = (name for name, value in vars(StepGRPOTrainer).items() if inspect.isfunction(value))
    name = next(name for name in methods if not hasattr(GRPOTrainer, name))
    monkeypatch.setattr(GRPOTrainer, name, lambda self: None, raising=False)
    touched, _ = trl_contract.touched_names(Libraries())
    assert set(touched) - set(table["names"]) == {f"trl:GRPOTrainer.{name}"}


# Behaviour


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
    assert_close(*gradients)
    logged = trainer._metrics["train"]
    assert logged["entropy"][0] == pytest.approx(logged["entropy"][1])
    if not trainer.args.use_bias_correction_kl and "beta" in changes:
        assert logged["kl"][0] == pytest.approx(logged["kl"][1])


def test_a_generation_batch_is_shuffled_and_split_by_rows_and_its_tail_floored():
    batch = {"x": torch.arange(10).reshape(5, 2), "n": torch.tensor(3)}
    assert sorted(shuffle_sequence_dict(batch)["x"].tolist()) == batch["x"].tolist()
    chunks = split_tensor_dict(batch, 2)
    assert [chunk["x"].tolist() for chunk in chunks] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(chunk["n"] == 3 for chunk in chunks)
