import math

import pytest
import torch

from agent_trainers.algorithms.losses import (
    cispo_loss,
    importance_log_ratio,
    kl_divergence,
    policy_loss,
    value_loss,
)

# Two steps of 2 and 1 trained tokens, an observation token between them.
LOG_RATIO = torch.tensor([[0.1, 0.3, 9.0, -0.2]])
MASK = torch.tensor([[1, 1, 0, 1]])
STEPS = torch.tensor([[0, 0, 0, 1]])


def ratios(level, length=3):
    log_ratio = importance_log_ratio(LOG_RATIO, MASK, STEPS, torch.tensor([length]), level)
    return log_ratio[MASK.bool()].tolist()


def test_the_importance_ratio_of_each_level():
    assert ratios("token") == pytest.approx([0.1, 0.3, -0.2])
    assert ratios("step") == pytest.approx([0.2, 0.2, -0.2])
    assert ratios("product") == pytest.approx([0.4, 0.4, -0.2])
    assert ratios("sequence") == pytest.approx([0.2 / 3] * 3)


def test_the_policy_loss_is_clipped_where_it_would_gain():
    log_ratio = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    advantages = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    loss, low, high = policy_loss(log_ratio, advantages, epsilon_low=0.2, epsilon_high=0.3)
    # the smaller of 3 and 2.6, of -3 and -2.6, of 1 and 1.6, of -1 and -1.6; with the sign turned
    assert loss[0].tolist() == pytest.approx([-2.6, 3.0, -1.0, 1.6])
    assert low.tolist() == [[False, False, False, True]]
    assert high.tolist() == [[True, False, False, False]]


def test_delta_bounds_the_ratio_of_bad_tokens():
    loss, _, _ = policy_loss(
        torch.tensor([[10.0]]).log(),
        torch.tensor([[-1.0]]),
        epsilon_low=0.2,
        epsilon_high=0.2,
        delta=4.0,
    )
    assert loss.item() == pytest.approx(4.0)


def test_cispo_weighs_the_gradient_with_a_bounded_ratio():
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    log_ratio = logprobs - math.log(0.1) + 1.0  # the ratio is 10
    loss, _, high = cispo_loss(log_ratio, logprobs, torch.tensor([[2.0]]), epsilon_high=3.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(6.0)
    assert logprobs.grad.item() == pytest.approx(-6.0)
    assert high.item()


def test_the_divergence_is_zero_for_equals_and_never_negative():
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]])
    reference = torch.tensor([[-1.0, -2.0, -0.5]])
    expected = [0.0, math.exp(-1) + 1 - 1, math.exp(0.5) - 0.5 - 1]
    assert kl_divergence(logprobs, reference)[0].tolist() == pytest.approx(expected)


def test_the_value_loss_is_that_of_the_worse_of_value_and_clipped_value():
    values = torch.tensor([[1.0, 1.0, 0.3]])
    old = torch.tensor([[0.0, 0.0, 0.0]])
    targets = torch.tensor([[1.0, -1.0, 1.0]])
    # clipped to 0.5 it is 0.5 off; unclipped it is 2 off; inside the range it is 0.7 off
    loss = value_loss(values, old, targets, 0.5)
    assert loss[0].tolist() == pytest.approx([0.125, 2.0, 0.245])
