"""Search for good episodes: several attempts at each task, one of which is chosen.

An attempt is a fresh episode, or continues an earlier one from the state with the highest learned
value (best-first search; a learned value guides the search as in arXiv:2407.01476).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.policies.policy import Policy, Usage
from agent_trainers.rollout.collector import OnEnd, Rollout
from agent_trainers.rollout.environments import MakeEnv
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

STRATEGIES: Final[Mapping[str, bool]] = {
    "sample": False,
    "best_of": True,
    "best_first": True,
    "oracle_best_of": False,
}
"""The names of the strategies, and whether each uses a learned value."""
MAX_CONTINUATIONS: Final = 8
"""Attempts that begin in the same state."""


@dataclass(slots=True)
class _Search:
    """The attempts at one task."""

    spec: EpisodeSpec
    attempts: list[Trajectory] = field(default_factory=list)
    final_scores: list[float] = field(default_factory=list)
    """Score of the end of each attempt."""
    states: dict[tuple[int, int], float] = field(default_factory=dict)
    """Scores of the attempts and steps from which the search may continue."""
    continued: Counter[tuple[int, int]] = field(default_factory=Counter)
    steps: int = 0

    def add(self, attempt: Trajectory, value: ProcessValue | None) -> None:
        self.attempts.append(attempt)
        self.steps += len(attempt.transitions) - attempt.start
        if value is None or not attempt.is_scorable:
            return
        *scores, last = score_states(attempt, value)
        self.final_scores.append(last)
        number, first = len(self.attempts) - 1, attempt.start + bool(attempt.start)
        self.states |= {(number, t): scores[t] for t in range(first, len(scores))}

    def next_state(self) -> tuple[int, int]:
        """Return the attempt and the step of the best state, and count it."""
        state = max(self.states, key=lambda state: self.states[state])
        self.continued[state] += 1
        if self.continued[state] == MAX_CONTINUATIONS:
            del self.states[state]
        return state


class SearchRollout:
    """Collects episodes by search; a `Collector`.

    The metric ``search_steps`` is the cost of an episode's search in environment steps, and its
    ``usage`` is that of all attempts. An error ends the search for its own episode only.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        policy: Policy,
        strategy: str,
        *,
        budget: int,
        longest: int,
        value: ProcessValue | None = None,
    ) -> None:
        """Search by `strategy` in environments that `make_env` makes.

        Args:
            make_env: Makes one environment.
            policy: The policy that acts.
            strategy: A key of `STRATEGIES`.
            budget: Environment steps for one episode, without replayed ones. The first attempt is
                always made; another one begins if the budget has room for `longest` steps.
            longest: Largest number of steps of an episode.
            value: Scores states for strategies that use a learned value.
        """
        self._rollout = Rollout(make_env, policy)
        self._strategy = strategy
        self._value = value if STRATEGIES[strategy] else None
        self._budget, self._longest = budget, longest

    def collect(
        self, specs: Sequence[EpisodeSpec], on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Search for one episode per spec; return them in order, failed ones included."""
        searches = [_Search(spec) for spec in specs]
        self._attempt(searches)
        while active := [search for search in searches if self._continues(search)]:
            if self._strategy == "best_first":
                self._continue_best(active)
            else:
                self._attempt(active)
        chosen = [self._choose(search) for search in searches]
        for trajectory in chosen:
            if on_end is not None:
                on_end(trajectory)
        return chosen

    def close(self) -> None:
        """Close the environments."""
        self._rollout.close()

    def _continues(self, search: _Search) -> bool:
        return (
            self._strategy != "sample"
            and search.steps + self._longest <= self._budget
            and search.attempts[-1].is_scorable
            and (self._strategy != "best_first" or bool(search.states))
        )

    def _attempt(self, searches: Sequence[_Search]) -> None:
        attempts = self._rollout.collect([search.spec for search in searches])
        for search, attempt in zip(searches, attempts, strict=True):
            search.add(attempt, self._value)

    def _continue_best(self, searches: Sequence[_Search]) -> None:
        places = [search.next_state() for search in searches]
        states = [(s.attempts[i], t) for s, (i, t) in zip(searches, places, strict=True)]
        branches = self._rollout.branch_many(states, 1, rng=[s.spec.rng for s in searches])
        for search, (attempt,) in zip(searches, branches.continuations, strict=True):
            search.add(attempt, self._value)

    def _choose(self, search: _Search) -> Trajectory:
        attempts, chosen = search.attempts, search.attempts[-1]
        if chosen.is_scorable:
            returns = [attempt.return_ for attempt in attempts]
            scores = returns if self._value is None else search.final_scores
            chosen = attempts[scores.index(max(scores))]
        usage = sum((Usage(**attempt.usage) for attempt in attempts), Usage())
        metrics = chosen.metrics | {"search_steps": float(search.steps)}
        return replace(chosen, start=0, metrics=metrics, usage=asdict(usage))


def score_states(trajectory: Trajectory, value: ProcessValue) -> list[float]:
    """Return the score of each state of an episode, and of its end, shape (S + 1,).

    It is the value of the state, at the end that of the last action. Where the environment starts
    another conversation, as with the next of several questions, the new state does not show the
    past: its score adds the gain within the new conversation to the score before it.
    """
    steps = trajectory.transitions
    ids = [(step.prompt_ids, [*step.prompt_ids, *step.completion_ids]) for step in steps]
    values = value.values([sequence for pair in ids for sequence in pair])
    of_states, of_actions = values[::2], values[1::2]
    scores, offset = of_states[:1], 0.0
    for before, after, action, state in zip(steps, steps[1:], of_actions, of_states[1:]):  # noqa: B905
        extends = after.messages[: len(before.messages)] == before.messages
        if not extends and not (before.info.get("context") or {}).get("reason"):
            offset += action - state
        scores.append(offset + state)
    return [*scores, offset + of_actions[-1]]
