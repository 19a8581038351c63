"""Estimators and losses that no table of ours holds."""

import numpy as np
import pytest
import torch

from agent_trainers import StepPPOTrainer
from tests.agent_trainers.gradients import assert_close, gradient, micro_batches


def above_the_median(episodes, gamma=1.0):
    """Returns less the median of the batch, for every step."""
    returns = [sum(episode.rewards) for episode in episodes]
    middle = np.median(returns)
    return [np.full(len(e.rewards), r - middle) for e, r in zip(episodes, returns, strict=True)]


def above_the_value(episodes, *, values):
    """The return less the value of each token."""
    return [
        sum(episode.rewards) - np.concatenate(steps)
        for episode, steps in zip(episodes, values, strict=True)
    ]


def one_for_all(episodes):
    return [np.ones(1)]


def clipped(log_ratio, advantages, epsilon_low, epsilon_high):
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.min(ratio * advantages, bounded * advantages)


def test_a_users_estimator_trains(make_trainer):
    trainer = make_trainer(advantage_estimator=above_the_median)
    before = [p.clone() for p in trainer.model.parameters()]
    trainer.train()
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    expected = above_the_median(trainer.trajectories["train"])
    assert len({a[0] for a in expected}) > 1
    for one, other in zip(trainer.last_batch.advantages, expected, strict=True):
        assert one == pytest.approx(other)


def test_a_users_estimator_may_ask_for_values_and_give_one_advantage_per_token(make_trainer):
    trainer = make_trainer(kind=StepPPOTrainer, advantage_estimator=above_the_value)
    trainer.train()
    lengths = [sum(t.lengths) for t in trainer.trajectories["train"]]
    assert [len(a) for a in trainer.last_batch.advantages] == lengths
    targets, weights = (trainer.last_batch.tensors[f"value_{n}"] for n in ("targets", "weights"))
    for row, target, weight in zip(trainer.last_batch.rows, targets, weights, strict=False):
        return_ = trainer.trajectories["train"][row.episode].return_
        assert_close(target[weight > 0], torch.tensor(return_))


def test_a_users_loss_that_is_a_built_in_one_has_its_gradient(make_trainer, played):
    gradients = []
    for loss in ("dapo", clipped):
        trainer = make_trainer(loss_type=loss, num_iterations=2)
        batches = micro_batches(trainer, played)
        torch.manual_seed(0)
        for parameter in trainer.model.parameters():  # so that some ratios are clipped
            parameter.data.add_(0.03 * torch.randn_like(parameter))
        gradients.append(gradient(trainer, batches))
    assert gradients[0].abs().max() > 1e-3
    assert torch.equal(*gradients)
