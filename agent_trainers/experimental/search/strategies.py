"""Search strategies, from a single episode to best-first search.

* ``sample`` and ``greedy`` run one episode; ``rerank`` executes the action with the highest learned
  value of several proposals. An agent in deployment can use these.
* ``best_of`` and ``vote`` run the task several times and choose an episode by a learned value, or
  by the most frequent answer (self-consistency, arXiv:2203.11171).
* ``beam`` and ``best_first`` return to intermediate states, so they need an environment that can
  be reset to them; a learned value scores states (as in arXiv:2407.01476).
* ``oracle_best_of``, ``oracle_beam`` and ``oracle_best_first`` use the environment's rewards, also
  those of rollouts from intermediate states: upper bounds, not agents.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent_trainers.experimental.search.search import Node, Plan, Search, Steps
from agent_trainers.rollout.voting import choose_by_majority

Rate = Callable[[Search, Sequence[Node]], Steps[list[Node]]]
"""Scores new states, possibly by rollouts from them; returns the ends of those rollouts."""
NOTHING: Final = ""
FRESH_EPISODES: Final = "fresh episodes"
RESTORE: Final = "restoring states"
REWARDS: Final = "true rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Width of a search."""

    candidates: int = 4
    """Actions tried in a state."""
    beam_width: int = 2
    """States that a beam keeps."""
    lookahead: int = 1
    """Rollouts with which an oracle scores a state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchKind:
    """A search strategy."""

    make_plan: Callable[[SearchSettings], Plan]
    needs: str
    """Requirement besides a policy and an environment."""
    uses_value: bool = False
    """Whether a learned value scores states."""
    is_greedy: bool = False
    """Whether the policy decodes greedily."""


def best(nodes: Iterable[Node]) -> Node:
    """Return the first of the states with the highest score."""
    return max(nodes, key=lambda node: node.score)


def run_once(search: Search, start: Node | None = None) -> Steps[Node]:
    """Run one episode to its end, or until the budget is spent."""
    node = search.start() if start is None else start
    while not node.is_over and search.affords(search.next_cost(node)):
        states = yield from search.expand([node], 1)
        if not states:
            break
        (node,) = states
    return node


def run_repeatedly(search: Search, choose: Callable[[Sequence[Node]], Node]) -> Steps[Node]:
    """Run episodes from the start until the budget is spent; return the chosen one."""
    nodes: list[Node] = []
    largest_cost = 0
    while not nodes or (largest_cost > 0 and search.affords(largest_cost)):
        before = search.steps
        nodes.append((yield from run_once(search)))
        largest_cost = max(largest_cost, search.steps - before)
    return choose([node for node in nodes if node.is_over] or nodes)


def rerank(search: Search, candidates: int) -> Steps[Node]:
    """Run one episode, executing in each state the proposal with the highest value."""
    node = search.start()
    while not node.is_over and search.affords(search.next_cost(node)):
        proposed = yield from search.propose([node], candidates, score=True)
        states = search.execute([max(proposed, key=lambda candidate: candidate.score)])
        if not states:
            break
        (node,) = states
    return node


def beam(search: Search, rate: Rate, settings: SearchSettings) -> Steps[Node]:
    """Expand the best states of each depth (beam search)."""
    ended: list[Node] = []
    states = [search.start()]
    while states:
        cost = settings.candidates * sum(search.step_cost(node) for node in states)
        if not search.affords(cost + search.steps_to_end(states[0])):
            break
        found = yield from search.expand(states, settings.candidates)
        ended += yield from rate(search, found)
        ended += [node for node in found if node.is_over]
        found.sort(key=lambda node: -node.score)
        states = [node for node in found if not node.is_over][: settings.beam_width]
    return (yield from _finish(search, states, ended, rate))


def best_first(search: Search, rate: Rate, settings: SearchSettings) -> Steps[Node]:
    """Expand the state with the highest score among those expanded least often."""
    ended: list[Node] = []
    states = [search.start()]
    expansions: Counter[Node] = Counter()
    known = {states[0]}
    num_fruitless = 0
    while num_fruitless <= len(states):
        # without an end yet, keep the steps of one episode in reserve
        reserve = 0 if ended else search.steps_to_end(states[0])
        node = min(states, key=lambda node: (expansions[node], -node.score))
        if not search.affords(settings.candidates * search.step_cost(node) + reserve):
            break
        expansions[node] += 1
        reached = yield from search.expand([node], settings.candidates)
        found = [node for node in reached if node not in known]
        known.update(found)
        num_fruitless = 0 if found else num_fruitless + 1
        ended += yield from rate(search, found)
        ended += [node for node in found if node.is_over]
        states += [node for node in found if not node.is_over]
    return (yield from _finish(search, states, ended, rate))


def by_value(search: Search, nodes: Sequence[Node]) -> Steps[list[Node]]:
    """Keep the scores of the learned value."""
    yield from ()
    return []


def by_lookahead(episodes: int) -> Rate:
    """Score a state by the mean return of rollouts from it."""

    def rate(search: Search, nodes: Sequence[Node]) -> Steps[list[Node]]:
        ended: list[Node] = []
        for node in nodes:
            returns = [node.return_] if node.is_over else []
            for _ in range(0 if node.is_over else episodes):
                if not search.affords(search.steps_to_end(node)):
                    break
                end = yield from run_once(search, node)
                if end.is_over:
                    end.score = end.return_
                    returns.append(end.return_)
                    ended.append(end)
            node.score = sum(returns) / len(returns) if returns else node.return_
        return ended

    return rate


def _finish(search: Search, states: Sequence[Node], ended: list[Node], rate: Rate) -> Steps[Node]:
    """Run the best open state to its end if it scores above all ends; return the best end."""
    if states and (not ended or best(states).score > best(ended).score):
        last = yield from run_once(search, best(states))
        if last.is_over or not ended:
            yield from rate(search, [last])
            ended.append(last)
    return best(ended)


def _vote(search: Search) -> Steps[Node]:
    return (
        yield from run_repeatedly(
            search,
            lambda nodes: nodes[choose_by_majority([search.trajectory(n) for n in nodes])],
        )
    )


def _best_of(key: Callable[[Node], float]) -> Plan:
    return lambda search: run_repeatedly(search, lambda nodes: max(nodes, key=key))


SEARCHES: Final[Mapping[str, SearchKind]] = {
    "sample": SearchKind(make_plan=lambda _: run_once, needs=NOTHING),
    "greedy": SearchKind(make_plan=lambda _: run_once, needs=NOTHING, is_greedy=True),
    "rerank": SearchKind(
        make_plan=lambda s: lambda search: rerank(search, s.candidates),
        needs=NOTHING,
        uses_value=True,
    ),
    "vote": SearchKind(make_plan=lambda _: _vote, needs=FRESH_EPISODES),
    "best_of": SearchKind(
        make_plan=lambda _: _best_of(lambda node: node.score),
        needs=FRESH_EPISODES,
        uses_value=True,
    ),
    "beam": SearchKind(
        make_plan=lambda s: lambda search: beam(search, by_value, s),
        needs=RESTORE,
        uses_value=True,
    ),
    "best_first": SearchKind(
        make_plan=lambda s: lambda search: best_first(search, by_value, s),
        needs=RESTORE,
        uses_value=True,
    ),
    "oracle_best_of": SearchKind(
        make_plan=lambda _: _best_of(lambda node: node.return_), needs=REWARDS
    ),
    "oracle_beam": SearchKind(
        make_plan=lambda s: lambda search: beam(search, by_lookahead(s.lookahead), s),
        needs=REWARDS,
    ),
    "oracle_best_first": SearchKind(
        make_plan=lambda s: lambda search: best_first(search, by_lookahead(s.lookahead), s),
        needs=REWARDS,
    ),
}
"""The strategies by name."""
