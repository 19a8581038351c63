"""Summaries that the policy writes: sampled, credited and trained like any other turn."""

from dataclasses import replace

import numpy as np
import pytest

from agent_envs.core.replay import replay
from agent_trainers import TINY_POLICY
from agent_trainers.batching.rows import make_rows
from agent_trainers.monitoring.trajectory_samples import step_tokens
from agent_trainers.policies.local import load_policy
from agent_trainers.trajectory import load_trajectories, save_trajectories
from tests.agent_trainers.gradients import gradient, micro_batches
from tests.agent_trainers.made import roll_out

CONTEXT = {"name": "policy", "budget_tokens": 200, "min_tokens": 90}


@pytest.fixture(scope="module")
def played():
    """Eight episodes of the embedded policy, which writes some text if a summary is requested."""
    policy = load_policy(str(TINY_POLICY), max_new_tokens=40)
    tasks = [task for task in range(2) for _ in range(4)]
    return roll_out(policy, tasks, context=CONTEXT, hops=4, max_episode_steps=12)


def with_rewards(trajectories):
    """Copies with a drawn reward in each step; the embedded policy earns none."""
    rng = np.random.default_rng(0)
    return [
        replace(each, transitions=[replace(s, reward=rng.normal()) for s in each.transitions])
        for each in trajectories
    ]


def summaries(trajectory):
    return [
        t
        for t, step in enumerate(trajectory.transitions)
        if step.info["action"]["kind"] == "summary"
    ]


def is_requested(transition):
    return transition.info.get("context", {}).get("is_summary_requested", False)


@pytest.mark.parametrize("train_summaries", [True, False])
def test_the_gradient_is_that_of_a_row_per_step(make_trainer, played, train_summaries):
    trainer = make_trainer(
        advantage_estimator="grpo_step", train_summaries=train_summaries, max_logprob_drift=None
    )
    trainer.model.double()
    episodes = with_rewards(played)
    (merged,) = micro_batches(trainer, episodes, merge_steps=True)
    together = gradient(trainer, [merged])
    (separate,) = micro_batches(trainer, episodes, merge_steps=False)
    apart = gradient(trainer, [separate])
    num_steps = sum(len(trajectory.transitions) for trajectory in played)
    assert len(merged["completion_ids"]) < num_steps == len(separate["completion_ids"])
    assert apart.abs().max() > 0.01
    # the model's norms and the log-probabilities stay float32
    assert (together - apart).abs().max() <= 1e-6


def test_a_summary_is_a_step_at_the_end_of_its_row(played):
    assert sum(len(summaries(trajectory)) for trajectory in played) > 8
    for trajectory in played:
        rows, last = make_rows(trajectory), len(trajectory.transitions) - 1
        ends = [row.steps[-1] for row in rows]
        assert ends == sorted({*summaries(trajectory), last})
        for row in rows[1:]:
            assert row.fork_reason.startswith("policy: the model's summary of")
        trained = [token for row in rows for token in np.array(row.completion_ids)[row.is_trained]]
        assert trained == [i for step in trajectory.transitions for i in step.completion_ids]


def test_masked_summaries_are_not_trained(played):
    for trajectory in played:
        rows = make_rows(trajectory, train_summaries=False)
        trained = {step for row in rows for step in np.array(row.steps)[row.is_trained].tolist()}
        assert trained == set(range(len(trajectory.transitions))) - set(summaries(trajectory))


def test_summaries_are_credited_as_steps(make_trainer, played):
    trainer = make_trainer(advantage_estimator="grpo_step")
    episodes = with_rewards(played)
    micro_batches(trainer, episodes)
    record = trainer.last_batch
    credit = []
    for i, episode in enumerate(episodes):
        tokens = step_tokens(record, i)
        for step in summaries(episode):
            num_tokens = len(episode.transitions[step].completion_ids)
            advantage = record.advantages[i][step]
            assert tokens[step].advantages == pytest.approx([advantage] * num_tokens)
            assert all(tokens[step].is_trained)
            credit.append(advantage)
    assert np.count_nonzero(credit) > len(credit) / 2


def test_recorded_episodes_replay_without_the_model(played, tmp_path):
    save_trajectories(tmp_path / "played.jsonl.gz", played)
    loaded = load_trajectories(tmp_path / "played.jsonl.gz")
    assert loaded == played
    thresholds = set()
    for trajectory in loaded:
        steps = trajectory.transitions
        list(
            replay(
                trajectory.make_env(), trajectory.seed, trajectory.task,
                [step.action for step in steps[:-1]],
                rewards=trajectory.rewards[:-1], messages=[step.messages for step in steps],
            )
        )  # fmt: skip
        thresholds.add(tuple(map(is_requested, steps)))
    assert len(thresholds) > 1
