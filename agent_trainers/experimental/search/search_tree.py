"""The tree that a search grows: states it has reached, and what that has cost.

A search (`agent_trainers.experimental.search.searches`) is a generator: it yields requests for
proposed or executed actions and receives their results, so that
`agent_trainers.experimental.search.search` can run many searches concurrently.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from agent_trainers.experimental.values.process_value import Reading
from agent_trainers.policies.generation import Generation, Usage
from agent_trainers.rollout.episode import Episode, TextEnv, template_tools
from agent_trainers.trajectory import StopReason, Trajectory


class ValueReader(Protocol):
    """A learned value of states and actions."""

    def read(self, readings: Sequence[Reading]) -> tuple[list[float], list[int]]:
        """Return the value of each, and how many tokens were read for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the search for one episode may cost."""

    steps: int
    """Environment steps: turns that were carried out, in whatever branch."""
    tokens: int | None = None
    """Tokens of states, actions and values that were read or written; None for no limit."""


@dataclass(slots=True)
class Spent:
    """What a search has cost so far."""

    steps: int = 0
    """Environment steps."""
    usage: Usage = field(default_factory=Usage)
    """What was asked of the policy."""
    value_tokens: int = 0
    """Tokens that a learned value has read."""
    most_of_a_turn: int = 0
    """Tokens of the dearest turn."""
    most_of_a_value: int = 0
    """Tokens of the dearest value."""

    @property
    def tokens(self) -> int:
        """All tokens together."""
        return self.usage.prompt_tokens + self.usage.completion_tokens + self.value_tokens

    def note_turn(self, generation: Generation) -> None:
        """Count what a turn took."""
        took = generation.spent
        self.usage += took
        tokens = took.prompt_tokens + took.completion_tokens
        self.most_of_a_turn = max(self.most_of_a_turn, tokens)

    def note_value(self, tokens: int) -> None:
        """Count what was read for a value."""
        self.value_tokens += tokens
        self.most_of_a_value = max(self.most_of_a_value, tokens)


@dataclass(slots=True, eq=False)
class Node:
    """A state that was reached, by which steps, and what it is thought to be worth."""

    episode: Episode
    """What was played up to here."""
    score: float = 0.0
    """The higher, the better; what it is in is the search's business."""
    offset: float = 0.0
    """What `score` holds besides the value of the state; see `score`."""
    children: dict[str, "Node"] = field(default_factory=dict)
    """What was tried here, by action: equal actions lead to equal states."""

    @property
    def is_over(self) -> bool:
        """Whether nothing follows."""
        return self.episode.stop_reason is not None

    @property
    def depth(self) -> int:
        """How many steps led here."""
        return len(self.episode.transitions)

    @property
    def step_cost(self) -> int:
        """Environment steps that one step from here takes at most: see `Tree.next_cost`."""
        return 1 if self.episode.saved is not None else 1 + self.depth

    def reading(self, action: str | None = None) -> Reading:
        """Return the state, or an action in it, as a learned value reads it."""
        info = self.episode.info
        return Reading(info["messages"], template_tools(info), action)

    def trajectory(self) -> Trajectory:
        """Return the episode; one that the budget did not bring to its end was cut off."""
        if not self.is_over:
            self.episode.cut_off(StopReason.TURN_LIMIT)
        return self.episode.trajectory()

    @property
    def return_(self) -> float:
        """What the environment has paid on the way here. Only an oracle may look."""
        return sum(transition.reward for transition in self.episode.transitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A wish: actions that the policy proposes in a state."""

    node: Node
    count: int
    is_valued: bool = False
    """Whether the learned value is to be asked about each, before any is carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An action that was proposed."""

    node: Node
    generation: Generation
    score: float = 0.0
    """What `Node.score` would be if the episode ended here, by the learned value."""

    @property
    def result(self) -> Node | None:
        """Where it led, if it was carried out."""
        return self.node.children.get(self.generation.text)


Wish = Sequence[Ask] | Sequence[Candidate]
Steps = Generator[Wish, Any, Any]
"""A part of a search, to be called with ``yield from``."""
Plan = Callable[["Tree"], Generator[Wish, Any, Node]]
"""A search: returns the node whose episode counts."""


class Tree:
    """The search for one episode: where it begins, and what it may still cost."""

    def __init__(
        self, root: Episode, budget: Budget, rng: np.random.Generator, turn_limit: int | None
    ) -> None:
        """Begin at the first state of an episode.

        Args:
            root: The episode, which has been reset.
            budget: What the search may cost.
            rng: What all draws of the search come from.
            turn_limit: How many steps an episode has at most; None where that is not known.
        """
        self._episode, self._turn_limit = root, turn_limit
        self.budget, self.rng, self.spent = budget, rng, Spent()
        self.first_score = 0.0
        """What the learned value says of the first state."""
        self.live: tuple[Episode, TextEnv] | None = None
        """The last state that was reached without a snapshot, and the environment that is still
        in it: one step from there replays nothing."""

    def begin(self) -> Node:
        """Return the first state, of which nothing is known yet: a new episode of the task."""
        return Node(self._episode, self.first_score)

    def affords(self, steps: int) -> bool:
        """Return whether so many steps can still be taken, each as dear as the dearest so far."""
        of_a_step = self.spent.most_of_a_turn + self.spent.most_of_a_value
        tokens = self.spent.tokens + steps * of_a_step
        is_within = self.budget.tokens is None or tokens <= self.budget.tokens
        return is_within and self.spent.steps + steps <= self.budget.steps

    def take_live(self, node: Node | None = None) -> TextEnv | None:
        """Return the environment that is still in a state, or in any, and forget it; or None."""
        if self.live is None or (node is not None and self.live[0] is not node.episode):
            return None
        (_, env), self.live = self.live, None
        return env

    def next_cost(self, node: Node) -> int:
        """Return how many environment steps one step from a state takes now.

        From a state without a snapshot all that led there are taken again, unless an environment is
        still in it: so an episode that is played to its end replays nothing.
        """
        is_live = self.live is not None and self.live[0] is node.episode
        return 1 if is_live else node.step_cost

    def steps_left(self, node: Node) -> int:
        """Return how many steps it may take to the end of an episode; 0 if that is not known."""
        depths = range(node.depth, self._turn_limit or 0)
        return len(depths) if node.episode.saved is not None else sum(depths) + len(depths)

    def propose(
        self, nodes: Iterable[Node], count: int, *, is_valued: bool = False
    ) -> Generator[Wish, Any, list[Candidate]]:
        """Let the policy propose `count` actions in each state."""
        candidates: list[Candidate] = yield [
            Ask(node=node, count=count, is_valued=is_valued) for node in nodes
        ]
        return candidates

    def carry_out(self, candidates: Sequence[Candidate]) -> Steps:
        """Carry actions out, those only that were not yet; see `Candidate.result`."""
        yield candidates

    def expand(self, nodes: Iterable[Node], count: int) -> Generator[Wish, Any, list[Node]]:
        """Try `count` actions in each state; return the states that they lead to."""
        candidates = yield from self.propose(nodes, count)
        yield from self.carry_out(candidates)
        return list(dict.fromkeys(c.result for c in candidates if c.result is not None))


def readings_of(parent: Node, child: Node) -> list[Reading]:
    """Return what a learned value has to read to score a state; see `score`."""
    before, now = parent.episode, child.episode
    if now.stop_reason is StopReason.CONTEXT_OVERFLOW:  # no step was taken
        return []
    action = parent.reading(now.transitions[-1].action)
    if child.is_over:
        return [action]
    return [child.reading()] if _goes_on(before.info, now.info) else [action, child.reading()]


def score(parent: Node, child: Node, values: Sequence[float]) -> None:
    """Score a state by the values of `readings_of`, each of the whole episode's outcome.

    What a state does not show, its value cannot know. Where the environment begins a conversation
    anew, as with the next of several questions, the score goes on from that of the conversation
    before: it is the value of the first state, and what the value gained in each conversation.
    """
    child.score = parent.offset + values[0] if values else parent.score
    child.offset = child.score - values[1] if len(values) > 1 else parent.offset


def _goes_on(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether a state is of the same conversation as the one before."""
    length = len(before["messages"])
    extends = list(now["messages"][:length]) == list(before["messages"])
    return extends or bool((now.get("context") or {}).get("reason"))


def best(nodes: Iterable[Node]) -> Node:
    """Return the best state; of several the first."""
    return max(nodes, key=lambda node: node.score)
