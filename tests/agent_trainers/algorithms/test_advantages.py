from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs import ConfigurationError, UnknownNameError
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimate, needs_values
from tests.agent_trainers.made import Episode

ANY_REWARD = [name for name in ADVANTAGE_ESTIMATORS if name != "max_rl"]
NO_CRITIC = [name for name in ANY_REWARD if not needs_values(name)]
CRITIC = [name for name in ADVANTAGE_ESTIMATORS if needs_values(name)]
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")


def group(*rewards, **settings):
    return [Episode("g", list(r), **settings) for r in rewards]


def estimate_all(name, episodes, value=0.0, **options):
    """Estimate; where there is a critic, with values that depend on an episode's rewards."""
    if needs_values(name):
        options["values"] = [
            [np.full(n, value * r) for n, r in zip(e.lengths, e.rewards, strict=True)]
            for e in episodes
        ]
    return estimate(name, episodes, **options)


def test_grpo_gives_every_step_the_group_normalised_return():
    # returns 1, 0, 2: mean 1, unbiased std 1; A = (R - 1) / (1 + 1e-4)
    advantages = estimate("grpo", group([0, 1], [0], [1, 0, 1]))
    assert [a.tolist() for a in advantages] == [
        [0, 0],
        pytest.approx([-1 / 1.0001]),
        pytest.approx([1 / 1.0001] * 3),
    ]


def test_grpo_step_compares_each_step_with_the_same_step_of_the_others():
    # G = (3, 2), (1, 1), (0): step 0 against (1 + 0) / 2, (3 + 0) / 2, (3 + 1) / 2; step 1 against
    # the one other episode that has it
    episodes = group([1.0, 2.0], [0.0, 1.0], [0.0])
    advantages = estimate("grpo_step", episodes, scale="none")
    assert [a.tolist() for a in advantages] == [[2.5, 1.0], [-0.5, -1.0], [-2.0]]
    # mean squares of the episodes: (6.25 + 1) / 2, (0.25 + 1) / 2, 4; their mean is 2.75
    scaled = np.concatenate(estimate("grpo_step", episodes))
    assert scaled == pytest.approx(np.concatenate(advantages) / (2.75**0.5 + 1e-4))
    # gamma 0.5: G = (2, 2), (0.5, 1), (0)
    discounted = estimate("grpo_step", episodes, gamma=0.5, scale="none")
    assert [a.tolist() for a in discounted] == [[1.75, 1.0], [-0.5, -1.0], [-1.25]]


def test_grpo_step_repeats_the_last_comparison_where_no_other_episode_is_left():
    # G = (2, 2, 1) and (1): step 0 is 2 - 1
    assert estimate("grpo_step", group([0.0, 1.0, 1.0], [1.0]), scale="none")[0].tolist() == [1] * 3


def test_grpo_step_does_not_blame_the_last_steps_of_solved_episodes():
    # FINDINGS C1: rewards on the way made early steps "good" and late ones "bad"
    solved = [1 / 3] * 3
    assert not np.any(estimate("grpo_step", group(*[solved] * 8)))
    advantages = estimate("grpo_step", group(*[solved] * 7, [0.0, 1 / 3, 1 / 3]))
    assert advantages[7][0] < 0
    assert not np.any(np.stack(advantages)[:, 1:])


def test_batch_scaling_divides_by_one_deviation_for_all_groups():
    episodes = [Episode("a", [0.0]), Episode("a", [1.0]), Episode("b", [0.0]), Episode("b", [3.0])]
    # values 0, 1, 0, 3: mean 1, unbiased variance (1 + 0 + 1 + 4) / 3 = 2
    advantages = estimate("grpo", episodes, scale="batch")
    divisor = 2**0.5 + 1e-4
    assert np.concatenate(advantages) == pytest.approx(np.array([-0.5, 0.5, -1.5, 1.5]) / divisor)


# A group of two: returns 1.5 and 0.5 (undiscounted), whose mean is 1.
PAIR = [
    Episode("g", [0.5, 1.0], lengths=[1, 3], anchors=["q", "a"]),
    Episode("g", [0.5], lengths=[2], anchors=["q"]),
]


@pytest.mark.parametrize(
    ("name", "expected", "deviation"),
    [
        ("dr_grpo", [0.5, 0.5, -0.5], 1.0),
        ("rloo", [1.0, 1.0, -1.0], 1.0),  # 1.5 - 0.5 and 0.5 - 1.5
        # G = 1.5 (1 token), 1.0 (3 tokens), 0.5 (2 tokens): mean (1.5 + 3 + 1) / 6 = 11 / 12
        # sum of squares: (7/12)^2 + 3 (1/12)^2 + 2 (5/12)^2 = (49 + 3 + 50) / 144 = 102 / 144
        ("reinforce_pp", [7 / 12, 1 / 12, -5 / 12], (102 / 144 / 5) ** 0.5),
        # 0.5 (4 tokens), -0.5 (2 tokens): mean 1/6; squares 4 (1/3)^2 + 2 (2/3)^2 = 12 / 9
        ("reinforce_pp_baseline", [1 / 3, 1 / 3, -2 / 3], (12 / 9 / 5) ** 0.5),
    ],
)
def test_a_pair_is_compared(name, expected, deviation):
    advantages = np.concatenate(estimate(name, PAIR))
    assert advantages == pytest.approx(np.array(expected) / deviation, rel=1e-5)


def test_rloo_compares_with_the_mean_of_the_others():
    # of three, returns 3, 0, 0: 3 - 0 and 0 - 1.5
    three = estimate("rloo", group([3.0], [0.0], [0.0]))
    assert np.concatenate(three) == pytest.approx([3.0, -1.5, -1.5])


def test_gigpo_adds_what_a_step_is_worth_among_steps_that_saw_the_same():
    # episode: (1.5 - 1) / (std + 1e-4), std of (1.5, 0.5) is 0.5 ** 0.5
    # step group "q": returns-to-go 1.5 and 0.5, the same numbers; "a" was seen once
    unit = 0.5 / (0.5**0.5 + 1e-4)
    advantages = estimate("gigpo", PAIR)
    assert advantages[0] == pytest.approx([2 * unit, unit])
    assert advantages[1] == pytest.approx([-2 * unit])
    half = estimate("gigpo", PAIR, step_advantage_weight=0.5, scale="none")
    assert half[0] == pytest.approx([0.75, 0.5])


def test_gagpo_gives_generalised_advantages_with_values_of_equal_observations():
    # V("q") = (1.5 + 0.5) / 2 = 1, V("a") = 1: d = (0.5 + 1 - 1, 1 - 1) and 0.5 - 1
    assert [a.tolist() for a in estimate("gagpo", PAIR, scale="none")] == [[0.5, 0.0], [-0.5]]
    # "q" after the first step, too: V("q") = (1.5 + 1 + 0.5) / 3 = 1
    again = [replace(PAIR[0], anchors=["q", "q"]), PAIR[1]]
    assert [a.tolist() for a in estimate("gagpo", again, scale="none")] == [[0.5, 0.0], [-0.5]]
    # three: V("q") = (2 + 0 + 1) / 3 = 1, V("a") = (2 + 0) / 2 = 1: d = (0, 1), (0, -1), (0);
    # A_0 = 0 + gamma lam A_1; with gamma 0.5: V("q") = (1 + 0 + 1) / 3 and d_0 = 0.5 - 2 / 3
    three = [
        Episode("g", [0.0, 2.0], anchors=["q", "a"]),
        Episode("g", [0.0, 0.0], anchors=["q", "a"]),
        Episode("g", [1.0], anchors=["q"]),
    ]
    advantages = estimate("gagpo", three, lam=0.5, scale="none")
    assert [a.tolist() for a in advantages] == [[0.5, 1.0], [-0.5, -1.0], [0.0]]
    first = estimate("gagpo", three, lam=0.5, gamma=0.5, scale="none")[0]
    assert first == pytest.approx([0.5 - 2 / 3 + 0.25, 1.0])
    # mean squares 0.625, 0.625, 0
    whole = np.concatenate(estimate("gagpo", three, lam=0.5))
    assert whole == pytest.approx(np.concatenate(advantages) / ((1.25 / 3) ** 0.5 + 1e-4))


def test_max_rl_divides_by_the_success_rate():
    # one of four: (1 - 0.25) / 0.25 = 3 and -1; none: 0
    episodes = [*group([0, 1], [0], [0], [0]), Episode("none", [0.0]), Episode("none", [0.0])]
    advantages = [a.tolist() for a in estimate("max_rl", episodes)]
    assert advantages == [[3, 3], [-1], [-1], [-1], [0], [0]]


def test_gdpo_normalises_each_reward_term():
    # right: 1, 0, 0 (mean 1/3, std 3 ** -0.5); format: 0, 10, 0 (mean 10/3, std 10 * 3 ** -0.5)
    terms = [[{"right": 0.0}, {"right": 1.0}], [{"format": 10.0}], [{}]]
    episodes = [Episode("g", [0.0] * len(t), reward_terms=t) for t in terms]
    root = 3**-0.5
    right = np.array([2 / 3, -1 / 3, -1 / 3]) / (root + 1e-4)
    formatted = np.array([-10 / 3, 20 / 3, -10 / 3]) / (10 * root + 1e-4)
    for weight in (1.0, 0.5):
        total = right + weight * formatted
        expected = total / (total.std(ddof=1) + 1e-4)
        advantages = estimate("gdpo", episodes, weights={"format": weight})
        assert [a[0] for a in advantages] == pytest.approx(expected, rel=1e-5)
        assert advantages[0].tolist() == [advantages[0][0]] * 2


# One episode of two steps, of 2 and 1 action tokens; rewards 1 and 2.
STEPS = Episode("g", [1.0, 2.0], lengths=[2, 1])
VALUES = [[np.array([0.5, 0.7]), np.array([0.4])]]
RAW = {"values": VALUES, "whiten": False}


def test_gae_step_runs_over_steps():
    # d_1 = 2 - 0.4 = 1.6; d_0 = 1 + 0.9 * 0.4 - 0.5 = 0.86; A_0 = 0.86 + 0.9 * 0.8 * 1.6 = 2.012
    (advantages,) = estimate("gae_step", [STEPS], gamma=0.9, lam=0.8, **RAW)
    assert advantages == pytest.approx([2.012, 1.6])


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not():
    cut = replace(STEPS, is_truncated=True)
    # d_1 = 2 + 0.9 * 3 - 0.4 = 4.3; A_0 = 0.86 + 0.72 * 4.3 = 3.956
    options = {"gamma": 0.9, "lam": 0.8, "bootstrap_values": [3.0], **RAW}
    assert estimate("gae_step", [cut], **options)[0] == pytest.approx([3.956, 4.3])
    for name in CRITIC:
        ended = estimate(name, [STEPS], **RAW, bootstrap_values=[3.0])
        assert ended[0] == pytest.approx(estimate(name, [STEPS], **RAW)[0])
        assert not np.allclose(estimate(name, [cut], **RAW, bootstrap_values=[3.0])[0], ended[0])
        assert estimate(name, [cut], **RAW)[0] == pytest.approx(ended[0])  # without, it is 0


def test_gae_token_runs_over_action_tokens():
    # tokens: V 0.5, 0.7, 0.4; r 0, 1, 2. d = 0.7g - 0.5, 1 + 0.4g - 0.7, 2 - 0.4 with g = 0.9:
    # 0.13, 0.66, 1.6; A_2 = 1.6, A_1 = 0.66 + 0.72 * 1.6 = 1.812, A_0 = 0.13 + 0.72 * 1.812
    (advantages,) = estimate("gae_token", [STEPS], gamma=0.9, lam=0.8, **RAW)
    assert advantages == pytest.approx([1.43464, 1.812, 1.6])
    # the reward comes with the last token
    four = Episode("g", [1.0], lengths=[4])
    (advantages,) = estimate("gae_token", [four], values=[[np.zeros(4)]], gamma=0.5, whiten=False)
    assert advantages == pytest.approx([0.125, 0.25, 0.5, 1.0])


def test_without_the_mask_observation_tokens_decay_the_credit():
    # one observation token with value 0.6 after the first step; r stays with the action's token
    values = [[np.array([0.5, 0.7, 0.6]), np.array([0.4])]]
    (advantages,) = estimate("gae_token", [STEPS], values=values, gamma=0.9, lam=0.8, whiten=False)
    # d = 0.13, 1 + 0.54 - 0.7 = 0.84, 0.36 - 0.6 = -0.24, 1.6
    a2 = -0.24 + 0.72 * 1.6
    a1 = 0.84 + 0.72 * a2
    assert advantages == pytest.approx([0.13 + 0.72 * a1, a1, a2, 1.6])


def test_gae_bilevel_gives_steps_their_return_and_tokens_a_share():
    # returns of steps: A + V = 2.512, 2.0 (see gae_step); inside step 0 with token discount 0.5:
    # d_1 = 2.512 - 0.7, d_0 = 0.5 * 0.7 - 0.5; A_0 = d_0 + 0.5 * 0.5 * d_1
    (advantages,) = estimate(
        "gae_bilevel", [STEPS], gamma=0.9, lam=0.8, token_gamma=0.5, token_lam=0.5, **RAW
    )
    assert advantages == pytest.approx([-0.15 + 0.25 * 1.812, 1.812, 1.6])
    (plain,) = estimate("gae_bilevel", [STEPS], gamma=0.9, lam=0.8, **RAW)
    assert plain == pytest.approx([2.512 - 0.5, 2.512 - 0.7, 1.6])
    # the value of a step is that of its first token: A_1 = 2 - 0.4, A_0 as in gae_step
    late = replace(STEPS, lengths=[1, 2])
    values = [[np.array([0.5]), np.array([0.4, 0.6])]]
    (plain,) = estimate("gae_bilevel", [late], values=values, gamma=0.9, lam=0.8, whiten=False)
    assert plain == pytest.approx([2.512 - 0.5, 1.6, 2.0 - 0.6])


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_an_episode_that_could_not_be_scored_is_left_out(name):
    failed = Episode("g", [5.0], is_scorable=False)  # not binary: max_rl does not read it
    pair = group([1.0], [0.0])
    with_failure = estimate_all(name, [pair[0], failed, pair[1]])
    assert with_failure[1].shape == (0,)
    assert np.concatenate(with_failure) == pytest.approx(np.concatenate(estimate_all(name, pair)))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_where_nothing_differs_nothing_is_taught(name):
    other = 0.0 if name == "max_rl" else 0.1
    for episodes in (group([1.0], [1.0]), group([1.0]), group([other], [other], [other])):
        advantages = estimate_all(name, episodes)
        assert all(np.all(a == 0) for a in advantages)


REWARDS = st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=1, max_size=4)
BATCHES = st.lists(st.tuples(st.sampled_from("abc"), REWARDS), min_size=1, max_size=8)
NAMES = st.sampled_from(ANY_REWARD)


@given(BATCHES, NAMES, st.randoms(use_true_random=False))
def test_the_order_of_episodes_does_not_matter(batch, name, random):
    episodes = [Episode(group_id, rewards) for group_id, rewards in batch]
    order = list(range(len(episodes)))
    random.shuffle(order)
    straight = estimate_all(name, episodes, 0.1)
    shuffled = estimate_all(name, [episodes[i] for i in order], 0.1)
    for place, i in enumerate(order):
        assert np.isfinite(shuffled[place]).all()
        assert shuffled[place] == pytest.approx(straight[i], abs=2e-3)


@given(BATCHES, st.data())
def test_the_length_of_actions_does_not_matter_where_steps_are_what_counts(batch, data):
    names = [n for n in NO_CRITIC if n not in WHITENED] + ["gae_step"]
    name = data.draw(st.sampled_from(names))
    short = [Episode(g, r) for g, r in batch]
    draw = st.integers(1, 5)
    long = [replace(e, lengths=[data.draw(draw) for _ in e.rewards]) for e in short]
    estimates = (estimate_all(name, episodes, 0.1) for episodes in (short, long))
    for one, other in zip(*estimates, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@given(BATCHES)
def test_without_discount_and_values_gae_is_the_return_to_go(batch):
    episodes = [Episode(g, r) for g, r in batch]
    expected = [np.cumsum(e.rewards[::-1])[::-1] for e in episodes]
    for name in CRITIC:
        advantages = estimate_all(name, episodes, whiten=False)
        for one, other in zip(advantages, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def divides(episodes):
    """An estimator of one's own that says no number."""
    with np.errstate(all="ignore"):
        return [np.array(e.rewards) / np.array(e.rewards) for e in episodes]


@pytest.mark.parametrize(
    ("name", "episodes", "options", "message"),
    [
        ("grpo_stp", [], {}, "Did you mean 'grpo_step'"),
        (divides, group([1.0], [0.0]), {}, r"divides returned .* for episode 1 of 2.*0\.0"),
        ("gae_step", [STEPS], {"values": [[np.zeros(2)]]}, "has 1 entries for 2 steps"),
        ("gae_step", [STEPS], {"values": [3 * [np.zeros(2)]]}, "has 3 entries for 2 steps"),
        ("max_rl", group([1.0], [0.3]), {}, r"returns of 0 or 1, but group 'g' has \[1.0, 0.3\]"),
        ("gae_token", [STEPS], {"values": [[np.zeros(1), np.zeros(1)]]},
         "Step 0 has 2 action tokens and 1 values"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_is_refused(name, episodes, options, message):
    with pytest.raises((ConfigurationError, UnknownNameError), match=message):
        estimate(name, episodes, **options)
