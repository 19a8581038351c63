"""Compare search strategies at equal budget: ``python -m agent_trainers.experimental.search``.

A search makes several attempts at a task and chooses one. An attempt is a fresh episode, or
continues an earlier one from the state with the highest learned value (best-first search; a learned
value guides the search as in arXiv:2407.01476).
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from transformers.hf_argparser import HfArg

from agent_envs.errors import ConfigurationError
from agent_envs.scoring.statistics import wilson_interval
from agent_trainers.cli.arguments import check_range, notifier, parse, run_command
from agent_trainers.cli.environments import evaluation_defaults, first_tasks
from agent_trainers.cli.policies import (
    PolicyArguments,
    check_episodes,
    open_environment,
    open_policy,
)
from agent_trainers.experimental.values.process_value import ProcessValue
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trajectory import Trajectory

PROGRAM: Final = "python -m agent_trainers.experimental.search"
_BUDGET_EPISODES: Final = 8
_LONGEST_EPISODE: Final = 10
"""Length that the default budget assumes for an environment without a turn limit."""
MAX_CONTINUATIONS: Final = 8
"""Attempts that begin in the same state."""
notify = notifier(PROGRAM)


@dataclass
class SearchArguments(PolicyArguments):
    """Options of the command."""

    value: str | None = HfArg(
        default=None,
        help="Folder of a trained value, or of a run with a critic; required by best_of and "
        "best_first.",
    )
    budget_steps: int | None = HfArg(
        default=None,
        help="Environment steps of the search for one episode; by default "
        f"{_BUDGET_EPISODES} episodes of full length.",
    )


def run(arguments: Sequence[str]) -> None:
    """Compare strategies on the same tasks and print their figures."""
    options = parse(
        arguments,
        SearchArguments,
        program=PROGRAM,
        description="Compare search strategies on the same tasks, at equal budget.",
    )
    check_range(options, "at least 1", lambda value: value >= 1, "budget_steps")
    if options.value is not None and options.base_url is not None:
        raise ConfigurationError("--value needs a local --model: a server returns no token ids.")
    environment = open_environment(options, notify, **evaluation_defaults(options.env))
    value = None if options.value is None else ProcessValue.load(options.value)
    if value is not None and value.tokenizer.get_vocab() != environment.tokenizer.get_vocab():
        raise ConfigurationError(f"--value {options.value}: its tokenizer is not the model's.")
    spec = environment.make_env().spec
    longest = (spec and spec.max_episode_steps) or _LONGEST_EPISODE
    budget = options.budget_steps or _BUDGET_EPISODES * longest
    tasks = first_tasks(environment.num_tasks, options.num_tasks)
    with (
        open_policy(options, environment) as policy,
        contextlib.closing(Rollout(environment.make_env, policy)) as rollout,
    ):
        attempt = functools.partial(search, rollout, budget=budget, longest=longest)
        fresh = attempt(plan_samples(tasks, 1, options.seed))
        _report("sample", [own[:1] for own in fresh], lambda _: 0.0)
        _report("oracle_best_of", fresh, lambda trajectory: trajectory.return_)
        if value is not None:
            score = functools.partial(_score_end, value)
            _report("best_of", fresh, score)
            guided = attempt(plan_samples(tasks, 1, options.seed), value=value)
            _report("best_first", guided, score)


def _report(
    name: str, searches: Sequence[Sequence[Trajectory]], score: Callable[[Trajectory], float]
) -> None:
    """Print success and cost of a strategy that chooses by `score`."""
    chosen = [choose(attempts, score) for attempts in searches]
    check_episodes(chosen)
    success = sum(trajectory.success for trajectory in chosen) / len(chosen)
    low, high = wilson_interval(success, len(chosen))
    attempts = [attempt for own in searches for attempt in own]
    num_tokens = sum(a.usage["prompt_tokens"] + a.usage["completion_tokens"] for a in attempts)
    sys.stdout.write(
        f"{name:15} success {success:.3f} [{low:.2f}, {high:.2f}]; per episode "
        f"{num_steps(attempts) / len(chosen):.1f} steps, {num_tokens / len(chosen):,.0f} tokens\n"
    )


def _score_end(value: ProcessValue, trajectory: Trajectory) -> float:
    return score_states(trajectory, value)[-1]


@dataclass(slots=True)
class _Search:
    """The attempts at one task."""

    spec: EpisodeSpec
    attempts: list[Trajectory] = field(default_factory=list)
    states: dict[tuple[int, int], float] = field(default_factory=dict)
    """Scores of the attempts and steps from which the search may continue."""
    continued: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, attempt: Trajectory, value: ProcessValue | None) -> None:
        self.attempts.append(attempt)
        if value is not None and attempt.is_scorable:
            scores = score_states(attempt, value)
            first = attempt.start + bool(attempt.start)
            number = len(self.attempts) - 1
            self.states |= {(number, t): scores[t] for t in range(first, len(scores) - 1)}

    def next_state(self) -> tuple[Trajectory, int]:
        """Return the best state, and count it."""
        number, step = max(self.states, key=lambda state: self.states[state])
        self.continued[number, step] += 1
        if self.continued[number, step] == MAX_CONTINUATIONS:
            del self.states[number, step]
        return self.attempts[number], step


def search(
    rollout: Rollout,
    specs: Sequence[EpisodeSpec],
    *,
    budget: int,
    longest: int,
    value: ProcessValue | None = None,
) -> list[list[Trajectory]]:
    """Make several attempts at the task of each spec, and return those of each.

    An error ends the search for its own task only: the last attempt then cannot be scored.

    Args:
        rollout: Runs the episodes.
        specs: The tasks.
        budget: Environment steps for one task, without replayed ones. The first attempt is always
            made; another one begins if the budget has room for `longest` steps.
        longest: Largest number of steps of an episode.
        value: Scores states for best-first search; without it, all attempts are fresh episodes.
    """
    searches = [_Search(spec) for spec in specs]
    for each, attempt in zip(searches, rollout.collect(specs), strict=True):
        each.add(attempt, value)
    while active := [
        each
        for each in searches
        if each.attempts[-1].is_scorable
        and num_steps(each.attempts) + longest <= budget
        and (value is None or each.states)
    ]:
        if value is None:
            new = rollout.collect([each.spec for each in active])
        else:
            states = [each.next_state() for each in active]
            branches = rollout.branch_many(states, 1, rng=[each.spec.rng for each in active])
            new = [attempt for (attempt,) in branches.continuations]
        for each, attempt in zip(active, new, strict=True):
            each.add(attempt, value)
    return [each.attempts for each in searches]


def num_steps(attempts: Sequence[Trajectory]) -> int:
    """Return the environment steps of attempts, without replayed ones."""
    return sum(len(attempt.transitions) - attempt.start for attempt in attempts)


def choose(attempts: Sequence[Trajectory], score: Callable[[Trajectory], float]) -> Trajectory:
    """Return the attempt with the highest score, or the last one if it cannot be scored."""
    return max(attempts, key=score) if attempts[-1].is_scorable else attempts[-1]


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


if __name__ == "__main__":
    run_command(PROGRAM, run, None)
