"""Tree of states reached by a search, and the rollout that runs many searches against one policy.

A strategy (`agent_trainers.experimental.search.strategies`) is a generator: it yields requests for
actions, so that the requests of all running searches are generated in one batch, and takes
environment steps directly. An error of the policy or of an environment fails only its own episode.
"""

import dataclasses
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from agent_envs.core.async_bridge import call_with_deadline
from agent_envs.core.replay import replay
from agent_envs.core.turn_limit import turn_limit_of
from agent_envs.errors import RolloutError
from agent_trainers.experimental.branching.saved_states import (
    LastState,
    restore_environment,
    saved_state,
)
from agent_trainers.experimental.values.process_value import Reading
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, Usage
from agent_trainers.rollout.environments import (
    EnvPool,
    TextEnv,
    is_immediate,
    lend_tokenizer,
    template_tools,
)
from agent_trainers.rollout.episode import Episode, EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

MAX_CONCURRENCY: Final = 16
"""Searches, each with its own environment, that run at once."""
T = TypeVar("T")
Generated = Generation | BaseException
Steps = Generator[list[GenerationRequest], list[Generated], T]


class Value(Protocol):
    """Learned value of states and actions, as `ProcessValue`."""

    def read(self, readings: Sequence[Reading]) -> tuple[list[float], list[int]]:
        """Return the value and the number of tokens of each reading."""


class SearchFailure(Exception):
    """Failure of the policy or environment within a search."""

    def __init__(
        self, episode: Episode, error: BaseException, reason: StopReason | None = None
    ) -> None:
        """Record `error` in a copy of the episode."""
        self.episode = dataclasses.replace(episode)
        self.episode.fail(error, reason)


@dataclass(slots=True, eq=False)
class Node:
    """A state reached by a search."""

    episode: Episode
    """Steps from the start of the episode to this state."""
    score: float = 0.0
    """Higher is better; the unit depends on the search."""
    offset: float = 0.0
    """Part of `score` that is not the value of this state; see `score_node`."""
    children: dict[str, "Node"] = field(default_factory=dict)
    """States reached from here by action; equal actions lead to equal states."""

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""
        return self.episode.stop_reason is not None

    @property
    def depth(self) -> int:
        """Number of steps from the start."""
        return len(self.episode.transitions)

    @property
    def return_(self) -> float:
        """Sum of rewards up to this state; for oracle searches only."""
        return sum(transition.reward for transition in self.episode.transitions)

    def reading(self, action: str | None = None) -> Reading:
        """Return the state, or an action in it, as input of a learned value."""
        info = self.episode.info
        return Reading(info["messages"], template_tools(info), action)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A proposed action."""

    node: Node
    generation: Generation
    score: float = 0.0
    """Score of the episode if it ended after the action, by the learned value."""

    @property
    def result(self) -> Node | None:
        """State it led to, if it was executed."""
        return self.node.children.get(self.generation.text)


class Search:
    """Search for one episode: the environment, the budget and what was spent of it."""

    def __init__(
        self,
        env: TextEnv,
        policy: Policy,
        spec: EpisodeSpec,
        budget: int,
        *,
        value: Value | None,
        timeout: float,
    ) -> None:
        """Reset the environment.

        Raises:
            SearchFailure: If the reset fails.
        """
        self.env, self.budget = env, budget
        self.steps, self.usage, self.value_tokens = 0, Usage(), 0
        self._policy, self._value, self._timeout, self._rng = policy, value, timeout, spec.rng
        self._root = self._position = self._new_episode(Episode(0, spec))
        try:
            self._root.begin(self._call(lambda: self._root.reset(timeout)))
        except (Exception, SystemExit) as error:
            raise SearchFailure(self._root, error) from error
        self._turn_limit = turn_limit_of(env)
        self._first_score = 0.0
        if value is not None:
            (self._first_score,) = self._read([Node(self._root).reading()])

    def start(self) -> Node:
        """Return the first state, without children."""
        return Node(self._root, self._first_score)

    def affords(self, steps: int) -> bool:
        """Return whether the budget has `steps` left."""
        return self.steps + steps <= self.budget

    def step_cost(self, node: Node) -> int:
        """Return the environment steps of one step from a state: with a replay if not saved."""
        return 1 if saved_state(node.episode) is not None else 1 + node.depth

    def next_cost(self, node: Node) -> int:
        """Return `step_cost`, or 1 if the environment is in the state already."""
        return 1 if self._position is node.episode else self.step_cost(node)

    def steps_to_end(self, node: Node) -> int:
        """Return the most steps to the end of an episode; 0 without a turn limit."""
        depths = range(node.depth, self._turn_limit or 0)
        return len(depths) if saved_state(node.episode) is not None else sum(depths) + len(depths)

    def propose(
        self, nodes: Iterable[Node], count: int, *, score: bool = False
    ) -> Steps[list[Candidate]]:
        """Sample `count` actions in each state; `score` them by the learned value."""
        sources = [node for node in nodes for _ in range(count)]
        generations = yield [
            dataclasses.replace(
                node.episode.request(),
                rng=np.random.default_rng(self._rng.integers(2**32, size=4)),
            )
            for node in sources
        ]
        candidates = []
        for node, generation in zip(sources, generations, strict=True):
            if isinstance(generation, BaseException):
                raise SearchFailure(node.episode, generation, StopReason.POLICY_ERROR)
            self.usage += generation.spent
            candidates.append(Candidate(node=node, generation=generation))
        if score:
            values = self._read([c.node.reading(c.generation.text) for c in candidates])
            candidates = [
                dataclasses.replace(c, score=c.node.offset + value)
                for c, value in zip(candidates, values, strict=True)
            ]
        return candidates

    def execute(self, candidates: Iterable[Candidate]) -> list[Node]:
        """Execute actions that are new in their state, as far as the budget goes.

        Returns:
            The distinct states that all `candidates` lead to.
        """
        candidates = list(candidates)
        new: list[tuple[Node, Node]] = []
        for candidate in candidates:
            if candidate.result is None and self.affords(self.next_cost(candidate.node)):
                new.append((candidate.node, self._step(candidate.node, candidate.generation)))
        if self._value is not None:
            readings = [readings_of(parent, child) for parent, child in new]
            values = iter(self._read([reading for several in readings for reading in several]))
            for (parent, child), several in zip(new, readings, strict=True):
                score_node(parent, child, [next(values) for _ in several])
        return list(dict.fromkeys(c.result for c in candidates if c.result is not None))

    def expand(self, nodes: Iterable[Node], count: int) -> Steps[list[Node]]:
        """Sample and execute `count` actions in each state; return the states they lead to."""
        return self.execute((yield from self.propose(nodes, count)))

    def trajectory(self, node: Node) -> Trajectory:
        """Return the episode up to a state, truncated if it has not ended."""
        if not node.is_over:
            node.episode.truncate(StopReason.TURN_LIMIT)
        return node.episode.trajectory()

    def _step(self, node: Node, generation: Generation) -> Node:
        before, episode = node.episode, self._new_episode(node.episode)
        episode.generation = generation
        if generation.finish_reason == "overflow":
            episode.overflow()
        else:

            def step() -> Any:
                self._go_to(before)
                lend_tokenizer(self._policy, self.env, before.info)
                self.steps += 1
                return episode.step(self._timeout)

            calls = 1 if self.next_cost(node) == 1 else 2 + node.depth
            try:
                episode.advance(self._call(step, calls))
            except (Exception, SystemExit) as error:
                raise SearchFailure(episode, error) from error
            self._position = episode
        child = Node(episode)
        node.children[generation.text] = child
        return child

    def _go_to(self, episode: Episode) -> None:
        """Bring the environment into a state, by snapshot or by replay, which counts."""
        if self._position is episode:
            return
        if (saved := saved_state(episode)) is not None:
            restore_environment(self.env, saved)
            return
        steps = replay(
            self.env,
            episode.spec.seed,
            episode.spec.task,
            [transition.action for transition in episode.transitions],
            messages=[*(tr.messages for tr in episode.transitions), episode.info["messages"]],
            timeout=self._timeout,
        )
        for number, step in enumerate(steps):
            self.steps += number > 0
            lend_tokenizer(self._policy, self.env, step.info)

    def _new_episode(self, start: Episode) -> Episode:
        episode = Episode(start.number, start.spec, states=LastState())
        episode.env, episode.info = self.env, start.info
        episode.transitions = list(start.transitions)
        return episode

    def _call(self, function: Callable[[], Any], calls: int = 1) -> Any:
        """Call a function that makes so many calls of the environment, within their timeouts."""
        seconds = None if is_immediate(self.env) else calls * self._timeout
        return call_with_deadline(function, seconds)

    def _read(self, readings: Sequence[Reading]) -> list[float]:
        assert self._value is not None
        values, counts = self._value.read(readings)
        if any(math.isnan(value) for value in values):
            raise RolloutError(
                "The learned value is NaN in some state, so it cannot guide a search. Check its "
                "training (value.json) and train it with a lower learning rate."
            )
        self.value_tokens += sum(counts)
        return values


Plan = Callable[[Search], Steps[Node]]
"""A strategy: returns the last state of the chosen episode."""


class SearchRollout:
    """Collects episodes by search; a `Collector`.

    Metrics of an episode include the cost of its search: ``search_steps`` in the environment and
    ``search_tokens`` of states, actions and values. Its ``usage`` is that of the whole search.
    """

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        policy: Policy,
        plan: Plan,
        budget: int,
        *,
        value: Value | None = None,
        step_timeout: float = 300.0,
    ) -> None:
        """Search by `plan` in environments that `make_env` makes.

        Args:
            make_env: Makes one environment.
            policy: Proposes actions.
            plan: Search strategy.
            budget: Environment steps of the search for one episode, replayed ones included.
            value: Scores states for plans that use a learned value.
            step_timeout: Seconds that a reset or a step may take.
        """
        self._envs = EnvPool(make_env)
        self._policy, self._plan, self._budget = policy, plan, budget
        self._value, self._step_timeout = value, step_timeout

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        on_end: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Search for one episode per spec; return them in order, failed ones included."""
        ended: dict[int, Trajectory] = {}
        waiting = list(enumerate(specs))[::-1]
        active: dict[int, Steps[Trajectory]] = {}
        requests: dict[int, list[GenerationRequest]] = {}
        replies: dict[int, list[Generated] | None] = {}
        while waiting or active:
            while waiting and len(active) < MAX_CONCURRENCY:
                key, spec = waiting.pop()
                active[key], replies[key] = self._search(spec), None
            for key, reply in replies.items():
                try:
                    requests[key] = active[key].send(reply)  # type: ignore[arg-type]
                except StopIteration as stop:
                    del active[key]
                    ended[key] = stop.value
                    if on_end is not None:
                        on_end(stop.value)
            replies, requests = self._generate(requests), {}
        return [ended[key] for key in range(len(specs))]

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _search(self, spec: EpisodeSpec) -> Steps[Trajectory]:
        env = self._envs.take()
        search: Search | None = None
        try:
            search = Search(
                env, self._policy, spec, self._budget, value=self._value,
                timeout=self._step_timeout,
            )  # fmt: skip
            node = yield from self._plan(search)
            trajectory = search.trajectory(node)
            self._envs.give_back(env)
        except SearchFailure as failure:  # the environment may be in any state and is dropped
            trajectory = failure.episode.trajectory()
        if search is None:
            return trajectory
        usage = search.usage
        tokens = usage.prompt_tokens + usage.completion_tokens + search.value_tokens
        cost = {"search_steps": float(search.steps), "search_tokens": float(tokens)}
        return dataclasses.replace(
            trajectory, metrics=trajectory.metrics | cost, usage=dataclasses.asdict(usage)
        )

    def _generate(
        self, requests: dict[int, list[GenerationRequest]]
    ) -> dict[int, list[Generated] | None]:
        """Generate all requests in one batch."""
        numbered = [(key, request) for key, several in requests.items() for request in several]
        results: dict[int, Generated] = {}
        stream = self._policy.open_stream()
        try:
            for i, (_, request) in enumerate(numbered):
                stream.add(i, dataclasses.replace(request, episode_id=i))
            while stream.has_requests:
                for i, result in stream.advance():
                    results[i] = result
                    stream.drop(i)
        finally:
            stream.close()
        replies: dict[int, list[Generated] | None] = {}
        for i, (key, _) in enumerate(numbered):
            replies.setdefault(key, []).append(results[i])  # type: ignore[union-attr]
        return replies


def readings_of(parent: Node, child: Node) -> list[Reading]:
    """Return the inputs of a learned value that score a state; see `score_node`."""
    before, now = parent.episode, child.episode
    if now.stop_reason is StopReason.CONTEXT_OVERFLOW:  # no step was taken
        return []
    action = parent.reading(now.transitions[-1].action)
    if child.is_over:
        return [action]
    continues = _continues_conversation(before.info, now.info)
    return [child.reading()] if continues else [action, child.reading()]


def score_node(parent: Node, child: Node, values: Sequence[float]) -> None:
    """Score a state by the values of `readings_of`.

    Where the environment starts another conversation, as with the next of several questions, the
    new state does not show the past: its score adds the gain within the new conversation to the
    score at the end of the one before.
    """
    child.score = parent.offset + values[0] if values else parent.score
    child.offset = child.score - values[1] if len(values) > 1 else parent.offset


def _continues_conversation(before: dict[str, Any], now: dict[str, Any]) -> bool:
    length = len(before["messages"])
    extends = list(now["messages"][:length]) == list(before["messages"])
    return extends or bool((now.get("context") or {}).get("reason"))
