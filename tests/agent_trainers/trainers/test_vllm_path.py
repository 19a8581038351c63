"""Training with vLLM, with a stand-in for the engine itself; `tests/vllm` runs the real one."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_envs import ConfigurationError
from tests.agent_trainers.vllm_stand_in import EngineStandIn, vllm_modules


class Generation:
    """TRL's ``VLLMGeneration``: weights and engine."""

    def __init__(self, trainer, drift):
        engine = EngineStandIn(trainer.model, trainer.eos_token_ids, drift)
        self.llm, self.calls = SimpleNamespace(llm_engine=engine, **self._sleep()), []
        self._llm_weights_sleeping = False

    def sync_weights(self):
        self._llm_weights_sleeping = False
        self.calls.append("weights")

    def _sleep(self):
        return {
            "wake_up": lambda tags: self.calls.append("awake"),
            "sleep": lambda level: self.calls.append("asleep"),
        }


@pytest.fixture
def make_trainer(make_trainer, monkeypatch):
    for name, module in vllm_modules().items():
        monkeypatch.setitem(sys.modules, name, module)

    def make(drift, **changes):
        trainer = make_trainer(max_steps=2, **changes)
        trainer.use_vllm = trainer.args.use_vllm = True
        trainer.vllm_generation = Generation(trainer, drift)
        trainer._last_loaded_step = -1
        rollout = trainer.rollouts.collectors["train"]
        rollout.policy = trainer.generator.make_policy(())  # of a trainer without vLLM before
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


@pytest.mark.parametrize(
    ("mode", "drift", "expected", "loss_mask"),
    [
        # the trainer finds each token exp(0.1) more likely
        ("token_truncate", 0.1, np.exp(0.1), True),
        ("token_truncate", 0.1, np.exp(0.1), False),
        ("token_truncate", 5.0, 3.0, True),  # cut at the bound
        ("token_mask", 5.0, 0.0, True),  # beyond the bound: masked
        ("token_truncate", float("nan"), 1.0, True),  # the sampler gave no log-probability
    ],
)
def test_the_ratio_between_trainer_and_sampler_corrects_each_trained_token(
    make_trainer, mode, drift, expected, loss_mask
):
    trainer = make_trainer(
        drift, vllm_importance_sampling_mode=mode, max_logprob_drift=None, loss_mask=loss_mask
    )
    trainer.args.vllm_importance_sampling_clip_max = 3.0
    trainer.model.train()
    batch = trainer._prepare_inputs([{"task": i // 4} for i in range(8)])
    trained = batch["action_mask"].bool()  # without the loss mask, observations have no ratio
    ratio = batch["importance_sampling_ratio"]
    assert torch.allclose(ratio[trained], torch.tensor(float(expected)), atol=1e-3)
    assert (ratio[~trained] == 1).all()
    loss = trainer.compute_loss(trainer.model, batch)
    assert torch.isfinite(loss)


def test_a_sampler_that_drifts_from_the_trainer_is_refused_before_a_step_is_taken(make_trainer):
    trainer = make_trainer(0.5)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(ConfigurationError, match=r"differ by 0\.5 nats per token.*chat template"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_weights_are_synchronised_once_a_step_and_drift_is_reported(make_trainer):
    trainer = make_trainer(0.1)
    trainer.train()
    assert trainer.vllm_generation.calls == ["weights"] * 2
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1, abs=1e-3)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, abs=1e-3)
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(np.exp(0.1), abs=1e-3)


def test_an_engine_that_sleeps_is_woken_for_each_batch(make_trainer):
    trainer = make_trainer(0.0, vllm_enable_sleep_mode=True)
    trainer.train()
    assert trainer.vllm_generation.calls == ["weights", "awake", "asleep"] * 2


def test_an_evaluation_beside_rollouts_ahead_publishes_its_weights(make_trainer, monkeypatch):
    trainer, published = make_trainer(0.0), []
    trainer.generator.ahead = object()
    monkeypatch.setattr(trainer.generator, "publish", lambda: published.append("paused"))
    with trainer.generator.rollout():
        assert published == ["paused"]
    assert trainer.vllm_generation.calls == []
