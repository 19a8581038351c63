"""Play episodes by search: many at once, each with a budget, against one policy.

What searches want is gathered in waves: all actions that any of them wants proposed, then all that
any wants carried out, then all values. A fault of the policy or of an environment ends the search
of its episode, which is then not scored, as without a search.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from agent_envs.core.async_bridge import CallSession, Outcome, outcome_of
from agent_envs.core.turn_limit import turn_limit_of
from agent_envs.errors import RolloutError
from agent_trainers.experimental.branching.saved_states import can_be_saved
from agent_trainers.experimental.search.search_run import SearchRun, Try, value_of
from agent_trainers.experimental.search.search_tree import (
    Ask,
    Budget,
    Candidate,
    Plan,
    Reading,
    Tree,
    ValueReader,
    readings_of,
    score,
)
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collection import IDLE_SECONDS
from agent_trainers.rollout.collector import EpisodeSpec, TextEnv
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import Episode, is_immediate
from agent_trainers.trajectory import StopReason, Trajectory

MAX_ENVS: Final = 16
"""So many environments are kept at most, where steps take their time: each may be a process."""


class SearchRollout:
    """Plays episodes by a search; a `Collector`.

    The episodes' metrics say what each search cost: ``search_steps`` in the environment, and
    ``search_tokens`` of states, actions and values. ``usage`` is that of the whole search.
    """

    def __init__(
        self,
        make_env: Callable[[], TextEnv],
        policy: Policy,
        plan: Plan,
        budget: Budget,
        *,
        value: ValueReader | None = None,
        step_timeout: float = 300.0,
    ) -> None:
        """Search by `plan` in environments that `make_env` makes.

        Args:
            make_env: Makes one environment.
            policy: Who proposes actions.
            plan: How to search; see `agent_trainers.experimental.search.searches`.
            budget: What the search for one episode may cost.
            value: What scores states for the plans that go by a learned value.
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
        """Search for one episode per spec; return them in order, also those that failed."""
        size = max(1, self._num_at_once(len(specs)))
        return [
            trajectory
            for i in range(0, len(specs), size)
            for trajectory in self._search(specs[i : i + size], on_end)
        ]

    def _num_at_once(self, count: int) -> int:
        """Return how many of `count` searches go on at once.

        Without snapshots each keeps an environment to itself, which may be a process.
        """
        env = self._envs.take()
        self._envs.give_back(env)
        return count if is_immediate(env) or can_be_saved(env) else MAX_ENVS

    def _search(
        self, specs: Sequence[EpisodeSpec], on_end: Callable[[Trajectory], None] | None
    ) -> list[Trajectory]:
        """Search for one episode per spec, all at once."""
        ended: dict[int, Trajectory] = {}

        def end(key: int, trajectory: Trajectory) -> None:
            ended[key] = trajectory
            if on_end is not None:
                on_end(trajectory)

        trees = self._begin(specs, end)
        under_way = {key: SearchRun(tree, self._plan) for key, tree in trees.items()}
        while under_way:
            self._propose([s for s in under_way.values() if s.error is None])
            self._carry_out([s for s in under_way.values() if s.error is None])
            for key, search in list(under_way.items()):
                if search.advance():
                    end(key, search.trajectory())
                    self._free(search.tree)
                    del under_way[key]
        return [ended[key] for key in range(len(specs))]

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()

    def _begin(
        self, specs: Sequence[EpisodeSpec], end: Callable[[int, Trajectory], None]
    ) -> dict[int, Tree]:
        """Reset an environment for each spec; `end` those that fail."""
        trees: dict[int, Tree] = {}
        episodes = [Episode(i, spec, keeps_states=True) for i, spec in enumerate(specs)]
        limits: dict[int, int | None] = {}

        def reset(env: TextEnv, key: int) -> Any:
            episodes[key].env = env
            limits[key] = turn_limit_of(env)
            return episodes[key].reset(self._step_timeout)

        for outcome, env in self._in_environments(reset, [1] * len(specs)):
            episode = episodes[outcome.key]
            try:
                episode.begin(value_of(outcome))
            except Exception as error:  # noqa: BLE001 - foreign code; it is recorded
                episode.fail(error)
                end(outcome.key, episode.trajectory())
            else:
                tree = Tree(episode, self._budget, episode.spec.rng, limits.get(outcome.key))
                trees[outcome.key] = tree
                self._keep(tree, episode, env)
        if self._value is not None and trees:
            roots = [tree.begin() for tree in trees.values()]
            values, counts = self._read([root.reading() for root in roots])
            for tree, first, count in zip(trees.values(), values, counts, strict=True):
                tree.first_score = first
                tree.spent.note_value(count)
        return trees

    def _propose(self, searches: Sequence[SearchRun]) -> None:
        """Serve the wishes for actions."""
        asks = [(search, ask) for search in searches for ask in search.wish if isinstance(ask, Ask)]
        asked = [(search, ask) for search, ask in asks for _ in range(ask.count)]
        requests = [
            dataclasses.replace(
                ask.node.episode.request(),
                episode_id=i,
                rng=np.random.default_rng(search.tree.rng.integers(2**32, size=4)),
            )
            for i, (search, ask) in enumerate(asked)
        ]
        candidates: list[tuple[SearchRun, Ask, Candidate]] = []
        for (search, ask), result in zip(asked, self._generate(requests), strict=True):
            if isinstance(result, BaseException):
                search.fail(ask.node.episode, result, StopReason.POLICY_ERROR)
            else:
                search.tree.spent.note_turn(result)
                candidates.append((search, ask, Candidate(node=ask.node, generation=result)))
        for search, candidate in self._valued(candidates):
            search.reply.append(candidate)

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation | BaseException]:
        stream = self._policy.open_stream()
        results: dict[int, Generation | BaseException] = {}
        try:
            for key, request in enumerate(requests):
                stream.add(key, request)
            while stream.has_requests:
                for key, result in stream.advance():
                    results[key] = result
                    stream.drop(key)
        finally:
            stream.close()
        return [results[key] for key in range(len(requests))]

    def _valued(
        self, candidates: Sequence[tuple[SearchRun, Ask, Candidate]]
    ) -> Iterator[tuple[SearchRun, Candidate]]:
        """Yield candidates, those with a value whose plan asks for it."""
        wanted = [(s, c) for s, ask, c in candidates if ask.is_valued]
        values: Iterator[float] = iter(())
        if wanted:
            readings = [c.node.reading(c.generation.text) for _, c in wanted]
            read, counts = self._read(readings)
            values = iter(read)
            for (search, _), count in zip(wanted, counts, strict=True):
                search.tree.spent.note_value(count)
        for search, ask, candidate in candidates:
            if ask.is_valued:
                at_end = candidate.node.offset + next(values)
                candidate = dataclasses.replace(candidate, score=at_end)
            yield search, candidate

    def _carry_out(self, searches: Sequence[SearchRun]) -> None:
        """Serve the wishes for steps: one for each action that is new in its state."""
        tries: list[Try] = []
        for search in searches:
            tries += search.tries(self._policy)
        timeout = self._step_timeout
        for outcome, env in self._in_environments(
            lambda env, i: tries[i].step(env, timeout),
            [each.num_calls for each in tries],
            [each.env for each in tries],
        ):
            each = tries[outcome.key]
            each.note(outcome)
            if each.is_new:
                self._keep(each.search.tree, each.node.episode, env)
            elif outcome.error is None:
                self._envs.give_back(env)
        new = [each for each in tries if each.is_new]
        readings = [readings_of(each.parent, each.node) for each in new] if self._value else []
        if readings:
            values, counts = self._read([r for several in readings for r in several])
            place = 0
            for each, several in zip(new, readings, strict=True):
                here = slice(place, place := place + len(several))
                score(each.parent, each.node, values[here])
                each.search.tree.spent.note_value(sum(counts[here]))

    def _read(self, readings: Sequence[Reading]) -> tuple[list[float], list[int]]:
        """Ask the learned value.

        Raises:
            RolloutError: If it says what is no number, by which nothing can be chosen.
        """
        assert self._value is not None
        values, counts = self._value.read(readings)
        if any(math.isnan(value) for value in values):
            raise RolloutError(
                "The learned value says NaN of a state, so no search can go by it. Look at how it "
                "was trained (value.json), and train it anew with a lower learning rate."
            )
        return values, counts

    def _keep(self, tree: Tree, episode: Episode, env: TextEnv) -> None:
        """Leave an environment in the state that it has come to, if no snapshot holds that."""
        if episode.saved is not None or episode.stop_reason is not None:
            self._envs.give_back(env)
            return
        self._free(tree)
        tree.live = (episode, env)

    def _free(self, tree: Tree) -> None:
        """Use the environment that is in a state of a search for others."""
        if (env := tree.take_live()) is not None:
            self._envs.give_back(env)

    def _in_environments(
        self,
        function: Callable[[TextEnv, int], Any],
        num_calls: Sequence[int],
        given: Sequence[TextEnv | None] = (),
    ) -> Iterator[tuple[Outcome, TextEnv]]:
        """Call a function with an environment and a key, from 0; yield what came of it, and where.

        `num_calls` says how many resets and steps it takes for each, which have so much time, and
        `given` which environment some are called with. Others take any that is given back; in those
        that only compute one after the other, else several side by side, each in a thread. One that
        failed may be in any state, and is not to be used again.
        """
        given, session = given or [None] * len(num_calls), CallSession()
        # from the end; given environments first, so that none is held while others are made
        waiting = sorted(range(len(num_calls)), key=lambda key: (given[key] is not None, -key))
        lent: dict[int, TextEnv] = {}
        while waiting or lent:
            while waiting and len(lent) < MAX_ENVS:
                key = waiting.pop()
                there = given[key]
                env = self._envs.take() if there is None else there
                if is_immediate(env):
                    # Ctrl-C is the user's; whatever else foreign code raises is recorded
                    caught = (Exception, SystemExit)
                    outcome = outcome_of(key, lambda: function(env, key), caught=caught)  # noqa: B023
                    yield outcome, env
                    continue
                lent[key] = env
                seconds = self._step_timeout * num_calls[key]
                session.submit(key, lambda k=key, e=env: function(e, k), seconds)  # type: ignore[misc]
            for outcome in session.wait(IDLE_SECONDS):
                yield outcome, lent.pop(outcome.key)
