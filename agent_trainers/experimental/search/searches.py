"""Ways to search for a good episode, within a budget, from no search at all to best-first.

What each needs to know differs, and decides where it can be used:

* ``sample`` and ``greedy`` play one episode; ``rerank`` plays one, too, whose actions a learned
  value chooses among several proposals before any is carried out. An agent at work can do that.
* ``best_of`` and ``vote`` play the task several times from its beginning, and choose an episode by
  a learned value or by the answer given most often (self-consistency, arXiv:2203.11171).
* ``beam`` and ``best_first`` go back to states in the midst of an episode, so they need an
  environment that can be set back. They see what it says, also that an episode is over; its rewards
  they do not see: a learned value scores states (as in arXiv:2407.01476).
* ``oracle_best_of``, ``oracle_beam`` and ``oracle_best_first`` see the environment's rewards, those
  of episodes played on from each state as well. No agent at work knows them: they are upper bounds.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_trainers.experimental.search.search_tree import Node, Plan, Steps, Tree, Wish, best
from agent_trainers.rollout.voting import choose_by_majority

Search = Generator[Wish, Any, Node]
Rate = Callable[[Tree, Sequence[Node]], Steps]
"""Scores states that are new, and may go on from them for that; returns episodes that ended."""
NOTHING: Final = ""
FRESH_EPISODES: Final = "fresh episodes"
SET_BACK: Final = "setting back"
REWARDS: Final = "true rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """How wide searches are."""

    candidates: int = 4
    """Actions that are tried in a state."""
    beam_width: int = 2
    """States that a beam goes on from."""
    lookahead: int = 1
    """Episodes that an oracle plays from each state to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchKind:
    """A way to search."""

    make_plan: Callable[[SearchSettings], Plan]
    """Makes the search."""
    needs: str
    """What it needs besides a policy and an environment."""
    uses_value: bool = False
    """Whether it goes by a learned value."""
    is_greedy: bool = False
    """Whether the most likely tokens are taken."""


def play_once(tree: Tree, start: Node | None = None) -> Search:
    """Play one episode to its end, as far as the budget goes."""
    node = tree.begin() if start is None else start
    while not node.is_over and tree.affords(tree.next_cost(node)):
        (candidate,) = yield from tree.propose([node], 1)
        yield from tree.carry_out([candidate])
        if candidate.result is None:
            break
        node = candidate.result
    return node


def play_often(tree: Tree, choose: Callable[[Sequence[Node]], Node]) -> Search:
    """Play episodes from the beginning as long as the budget lasts; return the chosen one."""
    played: list[Node] = []
    dearest = 0
    while not played or (dearest > 0 and tree.affords(dearest)):
        before = tree.spent.steps
        played.append((yield from play_once(tree)))
        dearest = max(dearest, tree.spent.steps - before)
    return choose([node for node in played if node.is_over] or played)


def rerank(tree: Tree, candidates: int) -> Search:
    """Play one episode; of the actions proposed in each state the most valuable is carried out."""
    node = tree.begin()
    while not node.is_over and tree.affords(tree.next_cost(node)):
        proposed = yield from tree.propose([node], candidates, is_valued=True)
        chosen = max(proposed, key=lambda candidate: candidate.score)
        yield from tree.carry_out([chosen])
        if chosen.result is None:
            break
        node = chosen.result
    return node


def beam(tree: Tree, rate: Rate, settings: SearchSettings) -> Search:
    """Go on from the best states of each depth, by several actions each (beam search)."""
    ended: list[Node] = []
    states = [tree.begin()]
    while states:
        cost = settings.candidates * sum(node.step_cost for node in states)
        if not tree.affords(cost + tree.steps_left(states[0])):
            break
        found = yield from tree.expand(states, settings.candidates)
        ended += yield from rate(tree, found)
        ended += [node for node in found if node.is_over]
        found.sort(key=lambda node: -node.score)
        states = [node for node in found if not node.is_over][: settings.beam_width]
    return (yield from _finish(tree, states, ended, rate))


def best_first(tree: Tree, rate: Rate, settings: SearchSettings) -> Search:
    """Go on from the best state wherever it is, first from those that were not gone on from."""
    ended: list[Node] = []
    states = [tree.begin()]
    times: Counter[Node] = Counter()
    known = {states[0]}
    num_fruitless = 0
    while num_fruitless <= len(states):
        # room is kept for one episode, from wherever the best state then is
        reserve = 0 if ended else tree.steps_left(states[0])
        node = min(states, key=lambda node: (times[node], -node.score))
        if not tree.affords(settings.candidates * node.step_cost + reserve):
            break
        times[node] += 1
        reached = yield from tree.expand([node], settings.candidates)
        found = [node for node in reached if node not in known]
        known.update(found)
        num_fruitless = 0 if found else num_fruitless + 1
        ended += yield from rate(tree, found)
        ended += [node for node in found if node.is_over]
        states += [node for node in found if not node.is_over]
    return (yield from _finish(tree, states, ended, rate))


def by_value(tree: Tree, nodes: Sequence[Node]) -> Steps:
    """Leave scores as the learned value gave them when the states were reached."""
    yield from ()
    return []


def by_lookahead(episodes: int) -> Rate:
    """Return what scores a state by the mean return of episodes that are played on from it."""

    def rate(tree: Tree, nodes: Sequence[Node]) -> Steps:
        returns: dict[Node, list[float]] = {n: [n.return_] if n.is_over else [] for n in nodes}
        ended: list[Node] = []
        for _ in range(episodes):
            begun = _as_many_as_can_end(tree, [node for node in nodes if not node.is_over])
            under_way = {node: node for node in begun}
            while under_way and tree.affords(sum(n.step_cost for n in under_way.values())):
                proposed = yield from tree.propose(under_way.values(), 1)
                yield from tree.carry_out(proposed)
                reached = dict(zip(under_way, [c.result for c in proposed], strict=True))
                for node, result in reached.items():
                    if result is not None and result.is_over:
                        returns[node].append(result.return_)
                        result.score = result.return_
                        ended.append(result)
                under_way = {n: r for n, r in reached.items() if r is not None and not r.is_over}
        for node, found in returns.items():
            node.score = sum(found) / len(found) if found else node.return_
        return ended

    return rate


def _as_many_as_can_end(tree: Tree, nodes: Sequence[Node]) -> list[Node]:
    """Return the first nodes from all of which the budget can bring an episode to its end.

    Begun from all at once, a small budget would be spent before any of them has ended.
    """
    chosen: list[Node] = []
    for node in nodes:
        if not tree.affords(sum(map(tree.steps_left, [*chosen, node]))):
            break
        chosen.append(node)
    return chosen


def _finish(tree: Tree, states: Sequence[Node], ended: list[Node], rate: Rate) -> Search:
    """Play the best state to its end, if it looks better than every end; return the best end."""
    if states and (not ended or best(states).score > best(ended).score):
        last = yield from play_once(tree, best(states))
        if last.is_over or not ended:
            yield from rate(tree, [last])
            ended.append(last)
    return best(ended)


def _by_majority(nodes: Sequence[Node]) -> Node:
    return nodes[choose_by_majority([node.trajectory() for node in nodes])]


def _highest_return(nodes: Sequence[Node]) -> Node:
    return max(nodes, key=lambda node: node.return_)


SEARCHES: Final[Mapping[str, SearchKind]] = {
    "sample": SearchKind(make_plan=lambda _: play_once, needs=NOTHING),
    "greedy": SearchKind(make_plan=lambda _: play_once, needs=NOTHING, is_greedy=True),
    "rerank": SearchKind(
        make_plan=lambda s: lambda tree: rerank(tree, s.candidates), needs=NOTHING, uses_value=True
    ),
    "vote": SearchKind(
        make_plan=lambda _: lambda tree: play_often(tree, _by_majority), needs=FRESH_EPISODES
    ),
    "best_of": SearchKind(
        make_plan=lambda _: lambda tree: play_often(tree, best),
        needs=FRESH_EPISODES,
        uses_value=True,
    ),
    "beam": SearchKind(
        make_plan=lambda s: lambda tree: beam(tree, by_value, s), needs=SET_BACK, uses_value=True
    ),
    "best_first": SearchKind(
        make_plan=lambda s: lambda tree: best_first(tree, by_value, s),
        needs=SET_BACK,
        uses_value=True,
    ),
    "oracle_best_of": SearchKind(
        make_plan=lambda _: lambda tree: play_often(tree, _highest_return), needs=REWARDS
    ),
    "oracle_beam": SearchKind(
        make_plan=lambda s: lambda tree: beam(tree, by_lookahead(s.lookahead), s), needs=REWARDS
    ),
    "oracle_best_first": SearchKind(
        make_plan=lambda s: lambda tree: best_first(tree, by_lookahead(s.lookahead), s),
        needs=REWARDS,
    ),
}
"""The searches by name."""
