"""The invariance contract, for every algorithm on a real model."""

import dataclasses
import json

import pytest
import torch

from agent_trainers import TINY_POLICY
from agent_trainers.trainers.config import PRESETS
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo import trainer_class
from tests.agent_trainers.gradients import assert_close, collect, gradient, micro_batches

ONE_RATIO_PER_TRAJECTORY = [
    name
    for name, settings in PRESETS.items()
    if settings.get("importance_sampling_level") == "sequence"
]
PACKAGE = "agent_trainers.experimental.branching"
BRANCHING = {
    name: {
        "advantage_estimator": f"{PACKAGE}:{name}",
        "extensions": json.dumps({f"{PACKAGE}:Branching": {"budget": 1.0}}),
    }
    for name in ("vine", "tree")
}
CRITIC = {**PRESETS["ppo"], "critic_model": str(TINY_POLICY), "gamma": 0.9, "lam": 0.8}
ALL = {**PRESETS, **BRANCHING, "critic": CRITIC}


@pytest.fixture
def make_trainer(make_trainer):
    def make(algorithm, **changes):
        # several passes over a batch, so that the policy that trains is not the one that sampled
        settings = {"num_iterations": 2, **ALL[algorithm], **changes}
        preset = {"critic": "ppo"}.get(algorithm, algorithm)
        kind = StepGRPOTrainer if algorithm in BRANCHING else trainer_class(preset)
        return make_trainer(kind=kind, **settings)

    return make


@pytest.fixture
def played(make_trainer, played, request):
    """Eight episodes, with branches of them for what looks at branches."""
    algorithm = request.node.callspec.params["algorithm"]
    if algorithm in BRANCHING:
        trainer = make_trainer(algorithm)
        trainer.model.train()
        return collect(trainer)
    return list(map(with_binary_return, range(8), played)) if algorithm == "max_rl" else played


def with_binary_return(number, episode):
    """A copy in which only the last step is rewarded, in every third episode."""
    *steps, last = [dataclasses.replace(step, reward=0.0) for step in episode.transitions]
    last = dataclasses.replace(last, reward=float(number % 3 == 0))
    return dataclasses.replace(episode, transitions=[*steps, last])


def gradient_of(trainer, trajectories, **changes):
    """The gradient for policy and critic that moved away from where the batch was made."""
    batches = micro_batches(trainer, trajectories, **changes)
    assert "old_per_token_logps" in batches[0]
    modules = [trainer.model, *([trainer.critic] if hasattr(trainer, "critic") else [])]
    parameters = [p for module in modules for p in module.parameters()]
    before = [p.detach().clone() for p in parameters]
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        parameter.data += 0.005 * torch.randn(parameter.shape, generator=generator)
    result = gradient(trainer, batches)
    for parameter, value in zip(parameters, before, strict=True):
        parameter.data.copy_(value)
    return result


@pytest.mark.parametrize("algorithm", ALL)
def test_merging_padding_micro_batches_and_order_do_not_change_the_gradient(
    make_trainer, played, algorithm
):
    assert (len(played) > 8) == (algorithm in BRANCHING)
    # the last episode trains nothing, so 7 rows or fewer fill 4 micro-batches of 2
    trajectories = [*played[:-1], dataclasses.replace(played[-1], transitions=[])]
    whole = make_trainer(algorithm)
    expected = gradient_of(whole, trajectories)
    assert expected.abs().max() > 1e-3
    parts = make_trainer(algorithm, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_close(gradient_of(parts, trajectories), expected)
    if algorithm not in ONE_RATIO_PER_TRAJECTORY:
        separate = gradient_of(whole, trajectories, merge_steps=False)
        # alone, rows begin elsewhere, and the angles of positions are rounded to float32
        assert_close(separate, expected)
    reordered = [*trajectories[5:], *trajectories[:5]]
    assert_close(gradient_of(whole, reordered, merge_steps=True), expected)
