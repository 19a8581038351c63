"""Search for good episodes: several attempts at each task, one of which is chosen.

An attempt is a fresh episode, or continues an earlier one from the state with the highest learned
value (best-first search; a learned value guides the search as in arXiv:2407.01476).
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from agent_envs.errors import RolloutError
from agent_trainers.experimental.branching.saved_states import StateStore
from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.policies.policy import Policy, Usage
from agent_trainers.rollout.collector import OnEnd, Rollout
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.evaluation import choose_by_majority
from agent_trainers.trajectory import Trajectory

MAX_CONTINUATIONS: Final = 8
"""Attempts that begin in the same state."""


@dataclass(slots=True)
class _Search:
    """The attempts at one task."""

    spec: EpisodeSpec
    attempts: list[Trajectory] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    steps: int = 0
    begun: Counter[tuple[int, int]] = field(default_factory=Counter)

    def best_state(self) -> tuple[int, int] | None:
        """Return the attempt and the step of the best state to continue from."""
        states = {
            (i, t): self.scores[i][t]
            for i, attempt in enumerate(self.attempts)
            for t in range(attempt.start + bool(attempt.start), len(attempt.transitions))
            if self.begun[i, t] < MAX_CONTINUATIONS
        }
        return max(states, key=lambda state: states[state], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A search strategy."""

    choose: Callable[[_Search], int]
    """Returns the number of the chosen attempt."""
    needs: str = ""
    """Requirement besides a policy and an environment."""
    is_repeated: bool = True
    uses_value: bool = False
    is_greedy: bool = False
    is_best_first: bool = False


def _best_by_value(search: _Search) -> int:
    return max(range(len(search.attempts)), key=lambda i: search.scores[i][-1])


STRATEGIES: Final[Mapping[str, Strategy]] = {
    "sample": Strategy(choose=lambda _: 0, is_repeated=False),
    "greedy": Strategy(choose=lambda _: 0, is_repeated=False, is_greedy=True),
    "vote": Strategy(choose=lambda s: choose_by_majority(s.attempts), needs="fresh episodes"),
    "best_of": Strategy(
        choose=_best_by_value, needs="fresh episodes, a value and token ids", uses_value=True
    ),
    "best_first": Strategy(
        choose=_best_by_value,
        needs="restoring states, a value and token ids",
        uses_value=True,
        is_best_first=True,
    ),
    "oracle_best_of": Strategy(
        choose=lambda s: max(range(len(s.attempts)), key=lambda i: s.attempts[i].return_),
        needs="true rewards",
    ),
}
"""The strategies by name."""


class SearchRollout:
    """Collects episodes by search; a `Collector`.

    The metric ``search_steps`` is the cost of an episode's search in environment steps, and its
    ``usage`` is that of all attempts. An error ends the search for its own episode only.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        strategy: Strategy,
        *,
        budget: int,
        longest: int,
        value: ProcessValue | None = None,
    ) -> None:
        """Search by `strategy` in environments that `make_env` makes.

        Args:
            make_env: Makes one environment.
            policy: The policy that acts.
            strategy: One of `STRATEGIES`.
            budget: Environment steps for one episode, replayed ones included. The first attempt is
                always made; another one begins if the budget has room for `longest` steps.
            longest: Largest number of steps of an episode.
            value: Scores states for strategies that use a learned value.
        """
        states = StateStore() if strategy.is_best_first else None
        self._rollout = Rollout(make_env, policy, states=states)
        self._strategy, self._value = strategy, value
        self._budget, self._longest = budget, longest

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Search for one episode per spec; return them in order, failed ones included."""
        searches = [_Search(spec) for spec in specs]
        self._play_fresh(searches)
        while active := [search for search in searches if self._goes_on(search)]:
            if self._strategy.is_best_first:
                self._continue_best(active)
            else:
                self._play_fresh(active)
        chosen = [self._choose(search) for search in searches]
        for trajectory in chosen:
            if on_end is not None:
                on_end(trajectory)
        return chosen

    def close(self) -> None:
        """Close the environments."""
        self._rollout.close()

    def _goes_on(self, search: _Search) -> bool:
        return (
            self._strategy.is_repeated
            and search.steps + self._longest <= self._budget
            and search.attempts[-1].is_scorable
            and (not self._strategy.is_best_first or search.best_state() is not None)
        )

    def _play_fresh(self, searches: Sequence[_Search]) -> None:
        attempts = self._rollout.collect([search.spec for search in searches])
        for search, attempt in zip(searches, attempts, strict=True):
            self._add(search, attempt, len(attempt.transitions))

    def _continue_best(self, searches: Sequence[_Search]) -> None:
        places = [search.best_state() or (0, 0) for search in searches]
        states = [(s.attempts[i], t) for s, (i, t) in zip(searches, places, strict=True)]
        branches = self._rollout.try_branches(states, 1, rng=[s.spec.rng for s in searches])
        for search, place, (attempt,), (replayed,) in zip(
            searches, places, branches.continuations, branches.replays, strict=True
        ):
            search.begun[place] += 1
            self._add(search, attempt, replayed + len(attempt.transitions) - attempt.start)

    def _add(self, search: _Search, attempt: Trajectory, cost: int) -> None:
        search.attempts.append(attempt)
        search.steps += cost
        if self._value is not None and attempt.is_scorable:
            search.scores.append(score_states(attempt, self._value))

    def _choose(self, search: _Search) -> Trajectory:
        attempts = search.attempts
        last = attempts[-1]
        chosen = attempts[self._strategy.choose(search)] if last.is_scorable else last
        usage = sum((Usage(**attempt.usage) for attempt in attempts), Usage())
        metrics = chosen.metrics | {"search_steps": float(search.steps)}
        return replace(chosen, start=0, metrics=metrics, usage=asdict(usage))


def score_states(trajectory: Trajectory, value: ProcessValue) -> list[float]:
    """Return the score of each state of an episode, and of its end, shape (S + 1,).

    It is the value of the state, at the end that of the last action. Where the environment starts
    another conversation, as with the next of several questions, the new state does not show the
    past: its score adds the gain within the new conversation to the score before it.

    Raises:
        RolloutError: If a value is NaN.
    """
    steps = trajectory.transitions
    ids = [(step.prompt_ids, [*step.prompt_ids, *step.completion_ids]) for step in steps]
    values = value.values([sequence for pair in ids for sequence in pair])
    if any(map(math.isnan, values)):
        raise RolloutError(
            "The learned value is NaN in some state, so it cannot guide a search. Train it again "
            "with a lower learning rate."
        )
    of_states, of_actions = values[::2], values[1::2]
    scores, offset = of_states[:1], 0.0
    for before, after, action, state in zip(steps, steps[1:], of_actions, of_states[1:]):  # noqa: B905
        extends = after.messages[: len(before.messages)] == before.messages
        if not extends and not (before.info.get("context") or {}).get("reason"):
            offset += action - state
        scores.append(offset + state)
    return [*scores, offset + of_actions[-1]]
