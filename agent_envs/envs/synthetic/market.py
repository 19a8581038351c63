"""A procedural market whose prices change while the agent compares them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import Progress, format_term, noted_terms
from agent_envs.core.tasks import Task
from agent_envs.core.tool import Tool, ToolError, quoted
from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError

OFFER_TEXT: Final = "{shop} sells the {item} for {price}."
SOLD_OUT_TEXT: Final = "{shop} is sold out."
BOUGHT_TEXT: Final = "You bought the {item} from {shop} for {price}."
NEWS_TEXT: Final = " News: {shop} has a new offer."
_SPLITS: Final = {"train": 0, "test": 1}
_SHOPS: Final = "arden brandt castell dorn ekberg falk garnier holm".split()
_ITEMS: Final = "anvil basket candle drum easel funnel globe hammer ink jar kettle lamp".split()
_MAX_CHANGES: Final = 6


class Change(NamedTuple):
    """A change of one shop's offer."""

    time: int
    """Number of calls after which it happens."""
    shop: str
    price: int | None
    """The new price; None if the shop is sold out."""


class Market(NamedTuple):
    """Offers and their changes."""

    item: str
    first_offers: Mapping[str, int | None]
    changes: Sequence[Change]

    def offers(self, time: int) -> dict[str, int | None]:
        """Return the price at each shop after `time` calls; None at one that is sold out."""
        new = {each.shop: each.price for each in self.changes if each.time <= time}
        return {**self.first_offers, **new}

    def news(self, time: int) -> list[str]:
        """Return the shops whose offer changes after `time` calls."""
        return [each.shop for each in self.changes if each.time == time]


class SyntheticMarketEnv(ToolEnv):
    """Buy at the lowest price in a market that changes with every few calls.

    Task: buy an item from the cheapest of `shops` shops, 2 to 8. During the first calls, the market
    changes up to `changes` times, 1 to 6; each change makes another shop the cheapest, by a lower
    price, a higher price, or because a shop is sold out. The next result has the name of the
    shop, but not its offer. Tools: ``ask(shop)`` for the offer, and ``buy(shop)`` at the price of
    that moment. Reward terms: ``cheapest``, 1 at the end if no other shop was cheaper (outcome);
    ``asked`` (share of the shops) and ``noticed`` (share of the changes, once their shop was asked
    again), of which a right purchase earns the rest (process); ``format``. The episode ends with
    the purchase, or without one with an answer. More than 4 shops or 2 changes may need
    ``max_episode_steps``.

    Version history: v0, first version.
    """

    reward_functions = {**noted_terms("cheapest", "asked", "noticed"), "format": format_term}
    default_rewards = {"cheapest": 1.0, "asked": 0.1, "noticed": 0.2}
    outcome_terms = frozenset({"cheapest"})
    computes_only = True
    metric_names = ("success", "noticed", "overpaid", *ToolEnv.metric_names)
    tool_signatures = ("ask(shop)", "buy(shop)")
    default_system_prompt = (
        "Compare the shops, then buy from the cheapest. Offers change while you ask; news of a new "
        "offer is at the end of a result."
    )

    def __init__(
        self, *, shops: int = 4, changes: int = 2, split: str = "train", **shared: Any
    ) -> None:
        """Choose the family.

        Args:
            shops: Number of shops.
            changes: Number of changes.
            split: ``"train"`` or ``"test"``, drawn independently: they share no task but by chance.
            shared: Arguments of `ToolEnv`.
        """
        for name, value, low, high in (
            ("shops", shops, 2, len(_SHOPS)), ("changes", changes, 1, _MAX_CHANGES)
        ):  # fmt: skip
            if type(value) is not int or not low <= value <= high:
                raise ConfigurationError(f"{name} must be {low} to {high}, not {value!r}.")
        self._num_shops, self._num_changes, self._split = shops, changes, split
        self._split_seed = lookup(_SPLITS, split, kind="split")
        tools = [Tool(each, timeout=None, stateful=True) for each in (self.ask, self.buy)]
        super().__init__(default_tools=tools, **shared)

    def get_task(self, index: int) -> Task:
        rng = np.random.default_rng([self._split_seed, index])
        shops = [str(shop) for shop in rng.choice(_SHOPS, self._num_shops, replace=False)]
        prices = 40 + rng.choice(60, self._num_shops, replace=False)
        market = Market(str(rng.choice(_ITEMS)), dict(zip(shops, prices.tolist(), strict=True)), [])
        time = self._num_shops - 1 + int(rng.integers(2))
        for _ in range(self._num_changes):
            offers = market.offers(time)
            changes = [*market.changes, Change(time, *_new_offer(offers, rng))]
            market, time = market._replace(changes=changes), time + int(rng.integers(1, 3))
        return Task(
            id=f"market-{self._num_shops}-{self._num_changes}-{self._split}-{index}",
            question=f"Buy the {market.item} at the lowest price. The shops are "
            f"{', '.join(shops)}.",
            answers=(),
            data={"market": market},
        )

    def begin_episode(self) -> None:
        self._time = 0
        """Number of calls that the market has answered."""
        self._asked: dict[str, int] = {}
        """Time of the last question to each shop."""
        self._paid: int | None = None
        self._lowest = 0
        """Lowest price at the moment of the purchase."""
        self._progress = {"asked": Progress(), "noticed": Progress()}

    def ask(self, shop: str) -> str:
        """Ask a shop for its offer.

        Args:
            shop: The name of the shop.
        """
        offers, shop = self._open(shop)
        self._asked[shop] = self._time
        self._advance("asked", len(self._asked) / len(offers))
        self._advance("noticed", self._share_noticed())
        return self._result(SOLD_OUT_TEXT if offers[shop] is None else OFFER_TEXT, shop, offers)

    def buy(self, shop: str) -> str:
        """Buy from a shop at its price of this moment.

        Args:
            shop: The name of the shop.
        """
        offers, shop = self._open(shop)
        if offers[shop] is None:
            return self._result(SOLD_OUT_TEXT, shop, offers)
        self._paid = offers[shop]
        self._lowest = min(price for price in offers.values() if price is not None)
        if self._paid == self._lowest:
            self.noted["cheapest"] = 1.0
            for term in self._progress:
                self._advance(term, 1.0)
        return BOUGHT_TEXT.format(item=self._market.item, shop=shop, price=self._paid)

    def is_finished(self) -> bool:
        return self._paid is not None

    def metrics(self) -> dict[str, float]:
        """Return the metrics; ``overpaid`` is the price paid over the lowest one, less 1."""
        overpaid = 0.0 if self._paid is None else self._paid / self._lowest - 1
        return {
            "success": float(self._paid is not None and overpaid == 0.0),
            "noticed": self._share_noticed(), "overpaid": overpaid, **super().metrics(),
        }  # fmt: skip

    def reference_actions(self) -> list[str]:
        """Return questions to all shops, then to those with news, and the purchase."""
        market = self._market
        actions, time, waiting = [], 0, list(market.first_offers)
        while waiting:
            actions.append(self.write_call("ask", shop=waiting.pop(0)))
            time += 1
            waiting += [shop for shop in market.news(time) if shop not in waiting]
        return [*actions, self.write_call("buy", shop=_by_price(market.offers(time))[0])]

    @property
    def _market(self) -> Market:
        market: Market = self.task.data["market"]
        return market

    def _open(self, shop: str) -> tuple[Mapping[str, int | None], str]:
        """Return the current offers and the shop's name as they spell it."""
        offers, name = self._market.offers(self._time), " ".join(shop.split()).lower()
        if name not in offers:
            raise ToolError(f"There is no shop {quoted(shop)}. The shops are {', '.join(offers)}.")
        return offers, name

    def _result(self, text: str, shop: str, offers: Mapping[str, int | None]) -> str:
        """Return the result of a call, with news if the market changes after it."""
        self._time += 1
        market = self._market
        result = text.format(shop=shop, item=market.item, price=offers[shop])
        return result + "".join(NEWS_TEXT.format(shop=each) for each in market.news(self._time))

    def _advance(self, term: str, share: float) -> None:
        self.noted[term] += self._progress[term].advance(share)

    def _share_noticed(self) -> float:
        changes = self._market.changes
        noticed = [self._asked.get(each.shop, -1) >= each.time for each in changes]
        return sum(noticed) / len(noticed)


def _by_price(offers: Mapping[str, int | None]) -> list[str]:
    """Return the shops that are not sold out, the cheapest first."""
    prices = {shop: price for shop, price in offers.items() if price is not None}
    return sorted(prices, key=prices.__getitem__)


def _new_offer(
    offers: Mapping[str, int | None], rng: np.random.Generator
) -> tuple[str, int | None]:
    """Draw a new offer of one shop, after which another shop is the cheapest."""
    ranked = _by_price(offers)
    prices = [offers[shop] or 0 for shop in ranked]
    kind = rng.choice(["lower", "higher", "sold out"][: 3 if len(ranked) > 2 else 2])
    if kind == "lower":
        return str(rng.choice(ranked[1:])), prices[0] - int(rng.integers(1, 6))
    if kind == "sold out":
        return ranked[0], None
    higher = [price for price in range(prices[1] + 1, prices[1] + 20) if price not in prices]
    return ranked[0], int(rng.choice(higher))
