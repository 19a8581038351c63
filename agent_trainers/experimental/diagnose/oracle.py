"""The oracle goes on from the states of episodes that failed: can they still be won?

From a state it tries every rest of the task's reference actions.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent_envs.core.async_bridge import call_with_deadline, resolve
from agent_envs.errors import ConfigurationError, SnapshotError
from agent_trainers.experimental.diagnose.diagnosis import (
    Diagnoses,
    Diagnosis,
    StateChance,
    conclude,
    give_up,
    is_won,
    last_line,
    own_actions,
)
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.env_pool import EnvPool
from agent_trainers.rollout.episode import TextEnv, is_immediate
from agent_trainers.trajectory import StopReason, Trajectory

MAX_PLANS: Final = 32
"""That the oracle tries at a state: those that begin nearest to what was done in order so far."""
STEP_TIMEOUT: Final = 300.0
"""Seconds that a reset or a step may take."""


def diagnose_by_oracle(
    make_env: Callable[[], TextEnv], trajectories: Sequence[Trajectory]
) -> Diagnoses:
    """Let the oracle go on from every state of episodes that failed.

    From a state the oracle tries every rest of the reference actions, those that are asked for at
    the state itself, where an environment works them out anew: if one of them succeeds, the state
    can still be won, and so can all before it, by the recorded steps. As an environment plays the
    same actions in the same way, the chance is 0 or 1, without an interval.

    Args:
        make_env: Makes an environment as the episodes were played in.
        trajectories: With `Trajectory.seed`; see `find_start`.

    An episode at which the environment raises or hangs is not diagnosed, and its note says why.

    Raises:
        ConfigurationError: If the environment has no ``reference_actions()``.
        SnapshotError: If no state of any episode can be reached again.
    """
    plans, failures = _plans_of_all(make_env, trajectories)
    policy = _FollowPlans()
    rollout = Rollout(make_env, policy)
    found = [_Found() for _ in trajectories]
    num_steps = sum(len(t.transitions) for t, own in zip(trajectories, plans, strict=True) if own)
    for attempt in range(max((len(p) for own in plans for p in own), default=0)):
        asked = [
            (i, t)
            for i, own in enumerate(plans)
            for t in range(found[i].first_open, len(own))
            if attempt < len(own[t]) and t not in found[i].out_of_reach
        ]
        if not asked:
            continue
        policy.follow([plans[i][t][attempt] for i, t in asked])
        states = [(trajectories[i], t) for i, t in asked]
        try:
            branches = rollout.branch_many(states, 1, rng=np.random.default_rng(0))
        except SnapshotError as error:  # it refuses all that are asked about
            if len({i for i, _ in asked} | failures.keys()) == len(trajectories):
                raise
            for i, t in asked:
                found[i].out_of_reach.add(t)
                found[i].broken[t] = str(error)
            continue
        num_steps += branches.num_steps
        for (i, t), (branch,) in zip(asked, branches.continuations, strict=True):
            found[i].note(t, branch)
    rollout.close()
    failures = {i: reason for i, each in enumerate(found) if (reason := each.reason)} | failures
    diagnoses = [
        give_up(trajectory, failures[i]) if i in failures else _by_oracle(trajectory, each.won)
        for i, (trajectory, each) in enumerate(zip(trajectories, found, strict=True))
    ]
    return Diagnoses(episodes=diagnoses, environment_steps=num_steps)


@dataclass(slots=True)
class _Found:
    """What the oracle came to from the states of an episode."""

    won: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """What it did to win, by the steps it did it from."""
    broken: dict[int, str] = field(default_factory=dict)
    """Why it could not go on to an end, by steps."""
    out_of_reach: set[int] = field(default_factory=set)
    """Steps before which the state is not to be tried again."""

    @property
    def first_open(self) -> int:
        """The first step not known to be before the loss: one that wins says so of all before."""
        return max(self.won, default=-1) + 1

    @property
    def reason(self) -> str | None:
        """Why nobody knows where the episode was lost; None if that is known."""
        unknown = [t for t in self.broken if t >= self.first_open]
        return self.broken[min(unknown)] if unknown else None

    def note(self, step: int, branch: Trajectory) -> None:
        """Note a continuation from the state before a step."""
        if branch.is_scorable:
            if is_won(branch):
                self.won[step] = own_actions(branch)
            return
        self.broken[step] = last_line(branch)
        if branch.stop_reason is StopReason.TIMEOUT or SnapshotError.__name__ in self.broken[step]:
            self.out_of_reach.add(step)


class _FollowPlans(Policy):
    """Takes given actions, those of each episode in order, and then ends it."""

    def follow(self, plans: Sequence[Sequence[str]]) -> None:
        """Take these actions in the next episodes, by their numbers."""
        self._left = [iter(plan) for plan in plans]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return the next action of each; an overflow ends an episode that has none left."""
        return [self._next(request.episode_id) for request in requests]

    def _next(self, number: int) -> Generation:
        action = next(self._left[number], None)
        if action is None:
            return Generation(text="", finish_reason="overflow")
        return Generation(text=action)


def _plans_of_all(
    make_env: Callable[[], TextEnv], trajectories: Sequence[Trajectory]
) -> tuple[list[list[list[list[str]]]], dict[int, str]]:
    """Return the plans of each episode, and which have none as the environment failed at them."""
    envs = EnvPool(make_env)
    plans: list[list[list[list[str]]]] = []
    failures: dict[int, str] = {}
    try:
        for i, trajectory in enumerate(trajectories):
            env = envs.take()
            timeout = STEP_TIMEOUT * (1 + len(trajectory.transitions))
            try:
                own = call_with_deadline(
                    functools.partial(_plans, env, trajectory),
                    None if is_immediate(env) else timeout,
                )
            except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; a note says it
                failures[i] = f"{type(error).__name__}: {error}"
                own = []
            else:
                envs.give_back(env)
            if own is None:
                raise ConfigurationError(
                    "The environment has no reference_actions(), so there is no oracle. Give it "
                    "that method, or let a model go on."
                )
            plans.append(own)
        return plans, failures
    finally:
        envs.close()


def _plans(env: TextEnv, trajectory: Trajectory) -> list[list[list[str]]] | None:
    """Return for the state before each step what the oracle tries there, the likeliest first.

    None where the environment has no oracle.
    """
    options = None if trajectory.task is None else {"task": trajectory.task}
    resolve(env.reset(seed=trajectory.seed, options=options))
    if getattr(env.unwrapped, "reference_actions", None) is None:
        return None
    plans, num_done = [], 0
    for transition in trajectory.transitions:
        try:
            reference = list(env.unwrapped.reference_actions())  # type: ignore[attr-defined]
        except NotImplementedError:  # this one task has none
            reference = []
        starts = sorted(range(len(reference)), key=lambda i: abs(i - num_done))
        plans.append([reference[i:] for i in starts[:MAX_PLANS]])
        num_done += num_done < len(reference) and reference[num_done] == transition.action
        _, _, terminated, truncated, _ = resolve(env.step(transition.action))
        if terminated or truncated:
            break
    # a replay that ends too early is refused when the states after are asked for
    plans += [[[]] for _ in trajectory.transitions[len(plans) :]]
    return plans


def _by_oracle(trajectory: Trajectory, won: dict[int, tuple[str, ...]]) -> Diagnosis:
    last = max(won, default=-1)
    recorded = [transition.action for transition in trajectory.transitions]
    states = []
    for t in range(len(recorded)):
        on_the_way = (*recorded[t:last], *won[last]) if t <= last else ()
        chance = float(t <= last)
        actions = won.get(t, on_the_way)
        states.append(StateChance(1, int(chance), chance, chance, chance, actions))
    return conclude(trajectory, states)
