import re

import gymnasium as gym
import pytest

from agent_envs import AgentEnvsError
from agent_envs.envs.synthetic.market import Change, Market
from tests.agent_envs.envs.playing import call, make, solve

ID = "AgentR1/SyntheticMarket-v0"
MARKET = Market(
    "kettle", {"holm": 50, "dorn": 60, "falk": 70},
    [Change(3, "holm", 65), Change(4, "falk", None)],
)  # fmt: skip


def open_market(market=MARKET):
    env = make(ID, task=0, shops=3)
    env.unwrapped.task.data["market"] = market
    return env


def rewards(env, *calls):
    return [call(env, name, shop=shop)[1] for name, shop in calls]


def test_offers_change_after_calls_and_the_result_has_the_shops_name_only():
    env = open_market()
    results = [call(env, "ask", shop=shop)[0] for shop in ("holm", "dorn", "falk", "holm", "falk")]
    assert results == [
        "holm sells the kettle for 50.",
        "dorn sells the kettle for 60.",
        "falk sells the kettle for 70. News: holm has a new offer.",
        "holm sells the kettle for 65. News: falk has a new offer.",
        "falk is sold out.",
    ]


@pytest.mark.parametrize(
    ("calls", "expected", "metrics"),
    [
        # asking pays .1 in thirds, noticing .2 in halves, a right purchase 1 and the rest of both
        pytest.param(
            [("ask", "holm"), ("ask", "dorn"), ("ask", "falk"), ("ask", "holm"), ("buy", "dorn")],
            [0.1 / 3, 0.1 / 3, 0.1 / 3, 0.1, 1.1], (1.0, 0.5, 0.0), id="notices one of two",
        ),
        pytest.param(
            [("ask", "holm"), ("ask", "dorn"), ("ask", "falk"), ("buy", "holm")],
            [0.1 / 3, 0.1 / 3, 0.1 / 3, 0.0], (0.0, 0.0, 5 / 60), id="misses the news",
        ),
        pytest.param([("buy", "holm")], [1.3], (1.0, 0.0, 0.0), id="is lucky"),
        pytest.param(
            [*[("ask", "holm")] * 4, ("buy", "falk"), ("buy", "dorn")],
            [0.1 / 3, 0.0, 0.0, 0.1, 0.0, 1.0 + 0.2 / 3 + 0.1], (1.0, 0.5, 0.0), id="sold out",
        ),
    ],
)  # fmt: skip
def test_rewards_of_questions_news_and_purchases(calls, expected, metrics):
    env = open_market()
    *steps, last = [call(env, name, shop=shop) for name, shop in calls]
    assert [step[1] for step in (*steps, last)] == pytest.approx(expected)
    assert [step[2] for step in (*steps, last)] == [False] * len(steps) + [True]
    found = [last[4]["metrics"][name] for name in ("success", "noticed", "overpaid")]
    assert found == pytest.approx(metrics)


def test_calls_of_one_turn_take_time_like_calls_of_several():
    env = open_market()
    turn = "\n".join(env.unwrapped.write_call("ask", shop=s) for s in ("holm", "dorn", "falk"))
    observation, reward, *_ = env.step(turn)
    assert observation.endswith("News: holm has a new offer.")
    assert reward == pytest.approx(0.1)


def test_unknown_shops_and_mistakes_leave_the_market_unchanged():
    env = open_market()
    assert call(env, "ask", shop="xy")[0] == (
        "There is no shop 'xy'. The shops are holm, dorn, falk."
    )
    env.step("hm")
    assert rewards(env, ("ask", " HOLM ")) == pytest.approx([0.1 / 3])
    assert "News" in [call(env, "ask", shop="dorn")[0] for _ in range(2)][-1]


@pytest.mark.parametrize(("shops", "changes"), [(2, 1), (4, 2), (8, 6)])
def test_every_change_makes_another_shop_the_cheapest(shops, changes):
    env = gym.make(ID, shops=shops, changes=changes, max_episode_steps=40)
    for task in range(50):
        assert solve(env, task)[0] == pytest.approx(1.3)
        market = env.unwrapped.task.data["market"]
        for change in market.changes:
            before, after = market.offers(change.time - 1), market.offers(change.time)
            prices = sorted(price for price in after.values() if price is not None)
            assert prices[0] < prices[1] or len(prices) == 1
            assert cheapest(before) != cheapest(after)


def cheapest(offers):
    return min(offers, key=lambda shop: offers[shop] or 1e9)


def test_an_agent_that_ignores_news_rarely_succeeds():
    env, num_right = gym.make(ID), 0
    for task in range(200):
        env.reset(options={"task": task})
        shops = env.unwrapped.task.data["market"].first_offers
        results = {shop: call(env, "ask", shop=shop)[0] for shop in shops}
        offers = {s: int(p[1]) for s, r in results.items() if (p := re.search(r"for (\d+)", r))}
        for shop in sorted(offers, key=offers.get):  # the next one if a shop is sold out
            _, _, is_over, _, info = call(env, "buy", shop=shop)
            if is_over:
                break
        num_right += info["metrics"]["success"]
    assert num_right / 200 < 0.4  # buying anywhere: .25


@pytest.mark.parametrize(
    "wrong",
    [{"shops": 1}, {"shops": 9}, {"shops": 4.0}, {"changes": 0}, {"changes": 7}, {"changes": True}],
)
def test_wrong_sizes_are_errors(wrong):
    with pytest.raises(AgentEnvsError, match="must be"):
        gym.make(ID, **wrong)
