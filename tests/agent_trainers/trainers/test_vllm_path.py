"""The way through TRL's vLLM interface, with a stand-in for the engine itself.

vLLM needs an accelerator; what stands in for it here takes and gives what TRL's
``VLLMGeneration.generate`` does, sampling from the same model at another numerical precision.
"""

import numpy as np
import pytest
import torch

from agent_envs import ConfigurationError
from agent_trainers.policies.sampling import SamplingSettings, sample


class Engine:
    """Samples like vLLM: token ids in; token ids and log-probabilities out."""

    def __init__(self, trainer, drift):
        self._trainer, self._drift = trainer, drift
        self.num_syncs, self.num_generations = 0, []

    def sync_weights(self):
        self.num_syncs += 1

    def generate(self, prompts, images, num_generations, profiler=None):
        self.num_generations.append(num_generations)
        settings = SamplingSettings(
            max_new_tokens=24, eos_token_ids=tuple(self._trainer.eos_token_ids), pad_token_id=0
        )
        rngs = [np.random.default_rng(i) for i in range(len(prompts))]
        completions = sample(self._trainer.model, prompts, rngs, settings)
        ids = [completion.token_ids for completion in completions]
        logprobs = [[[float(p) - self._drift] for p in c.logprobs] for c in completions]
        return prompts, ids, logprobs, None


@pytest.fixture
def make_trainer(make_trainer):
    def make(drift, **changes):
        trainer = make_trainer(max_steps=2, **changes)
        trainer.use_vllm = trainer.args.use_vllm = True
        trainer.vllm_generation = Engine(trainer, drift)
        trainer._last_loaded_step = -1
        rollout = trainer.rollouts.collectors["train"]
        rollout.policy = trainer.generator.make_policy(())  # of a trainer without vLLM before
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


@pytest.mark.parametrize(
    ("mode", "drift", "expected"),
    [
        ("token_truncate", 0.1, np.exp(0.1)),  # the trainer finds each token exp(0.1) more likely
        ("token_truncate", 5.0, 3.0),  # cut at the bound
        ("token_mask", 5.0, 0.0),  # beyond the bound: masked
        ("token_truncate", float("nan"), 1.0),  # the sampler gave no log-probability
    ],
)
def test_the_ratio_between_trainer_and_sampler_corrects_each_trained_token(
    make_trainer, mode, drift, expected
):
    trainer = make_trainer(drift, vllm_importance_sampling_mode=mode, max_logprob_drift=None)
    trainer.args.vllm_importance_sampling_clip_max = 3.0
    trainer.model.train()
    batch = trainer._prepare_inputs([{"task": i // 4} for i in range(8)])
    trained = batch["tool_mask"].bool()
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
    assert trainer.vllm_generation.num_syncs == 2
    assert set(trainer.vllm_generation.num_generations) == {1}
    logged = trainer.state.log_history[0]
    assert logged["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1, abs=1e-3)
    assert logged["sampling/sampling_logp_difference/max"] == pytest.approx(0.1, abs=1e-3)
    assert logged["sampling/importance_sampling_ratio/mean"] == pytest.approx(np.exp(0.1), abs=1e-3)
