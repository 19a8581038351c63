"""Search strategies, from a single episode to beam search.

* ``sample`` and ``greedy`` run one episode; ``rerank`` executes the action with the highest learned
  value of several proposals. An agent in deployment can use these.
* ``best_of`` and ``vote`` run the task several times and choose an episode by a learned value, or
  by the most frequent answer (self-consistency, arXiv:2203.11171). ``oracle_best_of`` chooses by
  the environment's rewards: an upper bound, not an agent.
* ``beam`` returns to intermediate states, so it needs an environment that can be reset to them; a
  learned value scores states (as in arXiv:2407.01476).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent_trainers.experimental.search.search import Node, Plan, Search, Steps
from agent_trainers.rollout.evaluation import choose_by_majority

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


def beam(search: Search, settings: SearchSettings) -> Steps[Node]:
    """Expand the best states of each depth (beam search); keep enough steps for one episode."""
    ended: list[Node] = []
    states = [search.start()]
    while states:
        cost = settings.candidates * sum(search.step_cost(node) for node in states)
        if not search.affords(cost + search.steps_to_end(states[0])):
            break
        found = yield from search.expand(states, settings.candidates)
        ended += [node for node in found if node.is_over]
        found.sort(key=lambda node: -node.score)
        states = [node for node in found if not node.is_over][: settings.beam_width]
    if states and (not ended or states[0].score > _best(ended).score):
        last = yield from run_once(search, states[0])
        if last.is_over or not ended:
            ended.append(last)
    return _best(ended)


def _best(nodes: Iterable[Node]) -> Node:
    return max(nodes, key=lambda node: node.score)


def _vote(search: Search) -> Steps[Node]:
    return (
        yield from run_repeatedly(
            search,
            lambda nodes: nodes[choose_by_majority([search.trajectory(n) for n in nodes])],
        )
    )


def _choose_best(key: Callable[[Node], float]) -> Plan:
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
        make_plan=lambda _: _choose_best(lambda node: node.score),
        needs=FRESH_EPISODES,
        uses_value=True,
    ),
    "beam": SearchKind(
        make_plan=lambda s: lambda search: beam(search, s), needs=RESTORE, uses_value=True
    ),
    "oracle_best_of": SearchKind(
        make_plan=lambda _: _choose_best(lambda node: node.return_), needs=REWARDS
    ),
}
"""The strategies by name."""
