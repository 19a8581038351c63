"""Judged rewards in rollouts, in metrics, and of recorded episodes."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from agent_envs.errors import DataError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.monitoring.episode_statistics import summarise, trainer_metrics
from agent_trainers.policies import ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.rescoring import rescore
from agent_trainers.trajectory import StopReason, load_trajectories, save_trajectories
from tests.agent_envs.judges import by_rules

ID = "AgentR1/SyntheticMultiHop-v0"
PATH = "tests.agent_envs.judges.by_rules"
REWARDS = {"exact_match": 1.0, f"{PATH}:reasoning": 0.3, f"{PATH}:steps": 0.05}
TURNS = (
    '<tool_call>{"name": "search", "arguments": {"query": "oslo"}}</tool_call>',
    '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>\n' * 2,
    "hm", "<answer>oslo</answer>", "<|im_end|>\u2028<answer>Ada</answer>",
)  # fmt: skip


def collect(count=12, turns=TURNS, context="full", rewards=REWARDS):
    policy = ScriptedPolicy(lambda request: turns[int(request.rng.integers(len(turns)))])
    make_env = lambda: gym.make(ID, rewards=rewards, context=context)  # noqa: E731
    specs = [
        EpisodeSpec(task=i // 4, seed=0, group_id=str(i // 4), rng=np.random.default_rng(i))
        for i in range(count)
    ]
    return Rollout(make_env, policy).collect(specs)


def test_recorded_episodes_are_judged_again_with_equal_results(tmp_path):
    episodes = collect()
    assert len({episode.return_ for episode in episodes}) > 5  # the scores differ
    assert {StopReason.ANSWERED, StopReason.TURN_LIMIT} == {e.stop_reason for e in episodes}
    save_trajectories(tmp_path / "episodes.jsonl.gz", episodes)
    judges = {"reasoning": (by_rules.reasoning, 0.3), "steps": (by_rules.steps, 0.05)}
    loaded = load_trajectories(tmp_path / "episodes.jsonl.gz")
    assert [rescore(episode, judges) for episode in loaded] == episodes
    blank = [
        replace(e, transitions=[replace(t, reward=0.0, reward_terms={}) for t in e.transitions])
        for e in loaded
    ]
    for episode, other in zip(blank, episodes, strict=True):
        for step, known in zip(
            rescore(episode, judges).transitions, other.transitions, strict=True
        ):
            assert step.reward_terms == {name: known.reward_terms[name] for name in judges}


def test_another_weight_changes_the_rewards_only():
    episode = collect(1)[0]
    (step,) = rescore(episode, {"reasoning": (by_rules.reasoning, 0.6)}).transitions[-1:]
    before = episode.transitions[-1].reward_terms["reasoning"]
    assert step.reward_terms["reasoning"] == pytest.approx(2 * before)
    assert step.reward == pytest.approx(episode.transitions[-1].reward + before)


def test_an_episode_that_could_not_be_judged_is_left_out_of_its_group():
    refused = "<answer>no judgement</answer>"
    episodes = collect(turns=(*TURNS[:1], *TURNS[3:], refused), rewards={f"{PATH}:reasoning": 1.0})
    failed = [e for e in episodes if e.stop_reason is StopReason.ENVIRONMENT_ERROR]
    assert 0 < len(failed) < len(episodes)
    assert all("status 400: refused" in e.error and not e.is_scorable for e in failed)
    scored = [e for e in episodes if e.is_scorable]
    summaries = [summarise(e) for e in episodes]
    advantages = estimate("grpo_step", summaries)
    expected = estimate("grpo_step", [summarise(e) for e in scored])
    kept = [a for a, e in zip(advantages, episodes, strict=True) if e.is_scorable]
    for advantage, other in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(advantage, other)
    assert trainer_metrics(summaries)["episodes/unscorable"] == len(failed) / len(episodes)


def test_a_judgement_that_fails_later_makes_a_recorded_episode_unscorable():
    episode = collect(1)[0]
    last = replace(episode.transitions[-1], action="no judgement")
    episode = replace(episode, transitions=[*episode.transitions[:-1], last])
    judged = rescore(episode, {"reasoning": (by_rules.reasoning, 1.0)})
    assert not judged.is_scorable
    assert "refused" in judged.error


def test_states_that_lack_what_was_judged_are_refused():
    env = gym.make(ID)
    env.reset(options={"task": 0})
    turns = (f"{env.unwrapped.reference_actions()[0]}\n" * 8,)  # its long results are shortened
    episode = collect(1, turns, {"name": "budget", "tokens": 1}, {f"{PATH}:reasoning": 1.0})[0]
    with pytest.raises(DataError, match="are not what was judged"):
        rescore(episode, {"reasoning": (by_rules.reasoning, 1.0)})


def test_scores_agreement_and_cost_of_judges_are_logged():
    metrics = trainer_metrics([summarise(episode) for episode in collect()])
    # the judges give equal scores for one criterion, and opposite ones for the other
    assert metrics["judges/reasoning/alpha/grounded"] == pytest.approx(1.0)
    assert metrics["judges/reasoning/alpha/brief"] < 0
    assert metrics["judges/reasoning/tokens"] % (2 * 1050) == 0
    assert metrics["judges/reasoning/cost"] > 0


def test_gdpo_credit_does_not_depend_on_the_scale_of_a_judged_term():
    episodes = collect()
    scaled = [rescore(e, {"reasoning": (by_rules.reasoning, 30.0)}) for e in episodes]
    before, after = (
        estimate("gdpo", [summarise(e) for e in each], weights={"reasoning": 0.3, "steps": 0.1})
        for each in (episodes, scaled)
    )
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=5e-3)  # deviations plus 1e-4
    assert any(np.abs(one).max() > 0.1 for one in before)


def test_a_schedule_scales_a_judged_term():
    episode = collect(1)[0]
    whole = summarise(episode).term_sums["reasoning"]
    assert summarise(episode, {"reasoning": 0.5}).term_sums["reasoning"] == whole / 2
