"""Gradients of a measured batch, and the scores of estimators by them."""

import contextlib
import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from agent_trainers import TINY_POLICY
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.models import load_model, load_tokenizer
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from benchmarks.credit.gradients import Products, compress, energy_and_signal, group_products
from benchmarks.credit.measure import Measurement
from benchmarks.credit.report import NOT_ESTIMABLE, write_report
from benchmarks.credit.scores import CEILINGS, NOT_APPLICABLE, Row, estimates_of, rows_of, score
from benchmarks.credit.true_advantages import CreditBatch, CreditEpisode, pack, unpack
from tests.benchmarks.test_credit_scores import COSTS

NUM_STATES = 4


def episode_of(gradients, advantages, group_id="0", rewards=None):
    size = len(advantages)
    return CreditEpisode(
        group_id=group_id, rewards=[0.0] * size if rewards is None else rewards,
        lengths=[1] * size, anchors=["x"] * size, states=["x"] * size,
        reward_terms=[{}] * size, advantages=list(advantages),
        standard_errors=[0.0] * size, halves=[list(advantages)] * 2,
        gradients=[pack(np.array(vector, float)) for vector in gradients],
    )  # fmt: skip


def batch_of(episodes, seed=1):
    return CreditBatch(
        environment="e", stage="start", seed=seed, success=0.5, reliability=1.0,
        reliability_by_variance=1.0, costs=COSTS, episodes=episodes, gradient_energy=1.0,
    )  # fmt: skip


def choices(seed, num_groups=12, group_size=8, num_steps=6):
    """Return a batch of a uniform policy with two actions in each of four states.

    The right action of a state earns 1, so the true advantage is 1/2 or -1/2; the gradient of the
    log-probability is 1/2 or -1/2, too, in the direction of the state.
    """
    rng = np.random.default_rng(seed)
    episodes = []
    for group in range(num_groups):
        for _ in range(group_size):
            states = rng.integers(NUM_STATES, size=num_steps)
            signs = rng.choice([-0.5, 0.5], size=num_steps)
            vectors = signs[:, None] * np.eye(NUM_STATES)[states]
            episodes.append(episode_of(vectors, signs.tolist(), str(group), (signs + 0.5).tolist()))
    return batch_of(episodes, seed)


def scores_of(row, batches):
    return score(batches, [estimates_of(row, batch) for batch in batches])


def test_the_cosine_of_two_steps_is_that_of_their_gradients():
    # the truth goes along (1, 1), the estimate along (1, 0)
    batch = batch_of([episode_of([[1, 0], [0, 1]], [1.0, 1.0])])
    assert score([batch], [[[1.0, 0.0]]]).cosine.value == pytest.approx(math.sqrt(0.5))
    assert score([batch], [[[-2.0, -2.0]]]).cosine.value == pytest.approx(-1.0)
    assert score([batch], [[[0.0, 0.0]]]).cosine.value == 0.0


def test_energy_and_signal_of_three_groups():
    vectors = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    products = Products(*[vectors @ vectors.T] * 3)
    # of six ordered pairs, two have the product 1; of three norms, all are 1
    (energy,), (signal,) = energy_and_signal(products, np.ones((1, 3)))
    assert (energy, signal) == (1.0, pytest.approx(1 / 3))
    # the first group drawn twice: only pairs of different groups count
    (energy,), (signal,) = energy_and_signal(products, np.array([[2.0, 0.0, 1.0]]))
    assert (energy, signal) == (1.0, 0.0)


def test_a_batch_counts_the_same_whatever_the_scale_of_an_estimator_there():
    batches = [choices(seed) for seed in (1, 2)]
    estimates = [estimates_of(Row("true", "true advantages"), batch) for batch in batches]
    scaled = [[factor * a for a in same] for factor, same in zip((1, 90), estimates, strict=True)]
    expected = score(batches, estimates).worth.value
    assert score(batches, scaled).worth.value == pytest.approx(expected)


def test_true_advantages_are_the_ceiling_and_grpo_is_worth_one_batch():
    batches = [choices(seed) for seed in (1, 2, 3)]
    ceiling, scaled = (scores_of(row, batches) for row in rows_of(list(CEILINGS)))
    grpo = scores_of(Row("grpo", "grpo"), batches)
    assert (ceiling.cosine.value, ceiling.cosine.low) == pytest.approx((1.0, 1.0))
    assert scaled.cosine.value == pytest.approx(1.0)  # all groups have the same scale here
    assert ceiling.worth.low > 1.0
    assert grpo.worth.value == grpo.worth.low == grpo.worth.high == pytest.approx(1.0)
    estimates = [estimates_of(Row("grpo", "grpo"), batch) for batch in batches]
    assert score(batches, estimates, cost=2.0).worth.value == pytest.approx(0.5)


def shift(batch, advantages):
    return [np.roll(values, 1) for values in advantages]


def flip_one_group(batch, advantages):
    flipped = batch.measured[0].group_id
    return [-a if e.group_id == flipped else a
            for e, a in zip(batch.measured, advantages, strict=True)]  # fmt: skip


def lift_every_second_step(batch, advantages):
    return [a + np.arange(len(a)) % 2 for a in advantages]


@pytest.mark.parametrize("fault", [shift, flip_one_group, lift_every_second_step])
def test_a_fault_in_an_estimator_lowers_cosine_and_worth(fault):
    batches = [choices(seed) for seed in (1, 2, 3)]
    right = [estimates_of(Row("true", "true advantages"), batch) for batch in batches]
    wrong = [fault(batch, same) for batch, same in zip(batches, right, strict=True)]
    before, after = score(batches, right), score(batches, wrong)
    assert after.cosine.value < 0.9995 < before.cosine.value
    assert not after.worth.value > 0.5 * before.worth.value  # or not estimable


def test_the_worth_of_noise_is_not_estimable(tmp_path):
    batches = [choices(seed) for seed in (1, 2, 3)]
    rng = np.random.default_rng(0)
    noise = [[rng.normal(size=6) for _ in batch.measured] for batch in batches]
    assert math.isnan(score(batches, noise).worth.value)
    rows = rows_of(["true advantages", "grpo"])
    facts = {"command": "c", "date": "d", "wanted": []}
    assert NOT_ESTIMABLE not in write_report(tmp_path, rows, batches, facts).partition("##")[2]
    useless = [choices(1, num_groups=2)]  # one pair of groups has no interval
    assert f"| e | {NOT_ESTIMABLE} | {NOT_ESTIMABLE} | not shown |" in write_report(
        tmp_path, rows, useless, facts
    )


def test_an_estimator_of_the_package_that_refuses_a_batch_is_not_applicable(monkeypatch):
    from agent_envs.errors import ConfigurationError

    def picky(episodes):
        raise ConfigurationError("no")

    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "picky", picky)
    assert estimates_of(Row("picky", "picky"), choices(1)) == NOT_APPLICABLE


def test_a_missing_rank_is_left_out_and_float16_keeps_the_products():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(50, 7)) * 1e6  # beyond float16
    vectors, kept = compress(exact @ exact.T)
    assert vectors.shape == (50, 7)
    assert kept == pytest.approx(1.0)
    stored = unpack([pack(vector) for vector in vectors])
    scale = (exact**2).sum(1).mean()
    assert stored @ stored.T == pytest.approx(exact @ exact.T / scale, abs=2e-3)
    assert compress(np.zeros((3, 3)))[0].tolist() == [[0.0]] * 3


def test_gradients_of_a_measured_batch_are_those_of_the_policy():
    model, tokenizer = load_model(TINY_POLICY), load_tokenizer(TINY_POLICY)
    specs = [
        EpisodeSpec(task=task, seed=task, group_id=str(task),
                    rng=np.random.default_rng([task, i]))
        for task in range(3) for i in range(3)
    ]  # fmt: skip
    policy = transformers_policy(model, tokenizer, max_new_tokens=24)

    def make_env():
        return gym.make("AgentR1/SyntheticMultiHop-v0")

    with contextlib.closing(Rollout(make_env, policy)) as rollout:
        measurement = Measurement(rollout, specs, 0)
        measurement.measure(0.5, 2)
    batch = measurement.batch(environment="e", stage="start", seed=0, model=model)
    assert batch.gradient_energy > 0.9998
    rng = np.random.default_rng(0)
    advantages = [[rng.normal(size=len(e.rewards)) for e in batch.measured] for _ in range(3)]
    exact = torch.stack([
        gradient_of(model, measurement.trajectories, same) for same in advantages
    ])  # fmt: skip
    stored = np.array([
        sum(a @ unpack(e.gradients) for e, a in zip(batch.measured, same, strict=True))
        for same in advantages
    ])  # fmt: skip
    products, expected = stored @ stored.T, (exact @ exact.T).numpy()
    # the stored unit is the root mean square norm of the steps
    scale = products.trace() / expected.trace()
    norms = np.sqrt(np.diag(expected))
    assert products / scale / np.outer(norms, norms) == pytest.approx(
        expected / np.outer(norms, norms), abs=1e-3
    )
    assert group_products(batch, advantages[0]).own.shape == (3, 3)


def gradient_of(model, trajectories, advantages):
    """Return the gradient of the sum of advantage times log-probability, by one backward pass."""
    total = torch.zeros(())
    for trajectory, values in zip(trajectories, advantages, strict=True):
        for step, advantage in zip(trajectory.transitions, values, strict=True):
            ids = torch.tensor([[*step.prompt_ids, *step.completion_ids]])
            logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
            for i, token in enumerate(step.completion_ids, start=len(step.prompt_ids)):
                total = total + advantage * logprobs[i - 1, token]
    gradients = torch.autograd.grad(total, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]).double()
