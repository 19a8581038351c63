"""Diagnosis of planted mistakes: ``python -m benchmarks.planted_mistakes``.

Episodes follow reference actions with harmless detours and one planted, irrecoverable mistake,
which the oracle's diagnosis has to name among all steps.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.data.files import write_json
from agent_envs.scoring import wilson_interval
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers.experimental.diagnose.oracle import diagnose_by_oracle
from agent_trainers.policies.policy import GenerationRequest, ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory

MAX_TRIES: Final = 40
"""Tasks tried per episode: not every task offers the mistake."""
Plant = Callable[[Any, np.random.Generator], tuple[list[str], int] | None]
"""Returns the actions for a reset environment and the index of the mistake, or None."""


class Planted(NamedTuple):
    """An episode with a mistake in it."""

    trajectory: Trajectory
    step: int
    """Index of the mistake."""


def wrong_answer(env: Any, rng: np.random.Generator) -> tuple[list[str], int]:
    """Answer one of several questions wrong."""
    reference = env.reference_actions()
    answers = [i for i, action in enumerate(reference) if "<answer>" in action]
    step = int(rng.choice(answers))
    others = [reference[i] for i in answers if reference[i] != reference[step]]
    wrong = str(rng.choice(others)) if others and rng.random() < 0.5 else env.write_answer("nobody")
    actions = [*reference[:step], wrong, *reference[step + 1 :]]
    return _with_detours(actions, step, [env.write_call("search", query="nothing")], 1, rng)


def wasted_turns(env: Any, rng: np.random.Generator) -> tuple[list[str], int]:
    """Search until fewer turns are left than the remaining questions take."""
    reference = env.reference_actions()
    answers = [i for i, action in enumerate(reference) if "<answer>" in action]
    num_answered = int(rng.integers(len(answers)))
    start = answers[num_answered - 1] + 1 if num_answered else 0
    step = env.max_turns - (len(reference) - answers[num_answered])  # one turn too few is left
    wasted = [env.write_call("search", query=f"nothing {i}") for i in range(step + 1 - start)]
    return [*reference[:start], *wasted, *reference[start:]], step


def wrong_number(env: Any, rng: np.random.Generator) -> tuple[list[str], int]:
    """Answer with another number than the last result."""
    *calls, _ = env.reference_actions()
    wrong = env.write_answer(str(int(env.task.answers[0]) + int(rng.integers(1, 20))))
    return _with_detours([*calls, wrong], len(calls), calls, int(rng.integers(3)), rng)


def lost_file(env: Any, rng: np.random.Generator) -> tuple[list[str], int] | None:
    """Overwrite, move or delete a file that is still needed."""
    reference = env.reference_actions()
    needed = sorted({*env.task.data["task"].files} & {*env.task.data["task"].expected})
    if not needed:
        return None
    name = str(rng.choice(needed))
    command = rng.choice(["rm -f '{}'", "echo lost > '{}'", "mv '{}' /tmp/"]).format(name)
    step = int(rng.integers(len(reference)))
    actions = [*reference[:step], env.write_call("shell", command=command), *reference[step:]]
    detours = [env.write_call("shell", command=c) for c in ("ls -R", "pwd", "wc -c *")]
    spare = max(0, min(2, env.max_turns - len(actions)))
    return _with_detours(actions, step, detours, spare, rng)


def _with_detours(
    actions: Sequence[str],
    step: int,
    detours: Sequence[str],
    count: int,
    rng: np.random.Generator,
) -> tuple[list[str], int]:
    """Insert `count` harmless actions; return them all, and the new index of `step`."""
    longer = list(actions)
    for _ in range(count):
        place = int(rng.integers(len(longer)))
        longer.insert(place, str(rng.choice(list(detours))))
        step += place <= step
    return longer, step


class Case(NamedTuple):
    """An environment and a mistake to plant."""

    env: str
    kwargs: Mapping[str, Any]
    plant: Plant
    num_episodes: int
    """Of 200 episodes in total."""


LONG_HORIZON: Final = "AgentR1/SyntheticLongHorizon-v0"
CASES: Final[Mapping[str, Case]] = {
    "several questions, one answered wrong": Case(LONG_HORIZON, {}, wrong_answer, 60),
    "several questions, turns wasted": Case(LONG_HORIZON, {}, wasted_turns, 30),
    "arithmetic, wrong number": Case("AgentR1/SyntheticArithmetic-v0", {}, wrong_number, 30),
    "command line, a file lost": Case("AgentR1/CommandLine-v0", {}, lost_file, 80),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=200, help="of all cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    options = parser.parse_args(arguments)
    named = {}
    for number, (name, case) in enumerate(CASES.items()):
        count = round(case.num_episodes * options.episodes / 200)
        rng = np.random.default_rng([options.seed, number])
        planted = list(plant_all(case, count, rng))
        make_env = functools.partial(gym.make, case.env, **case.kwargs)
        found = diagnose_by_oracle(make_env, [each.trajectory for each in planted])
        named[name] = [d.lost_step == p.step for d, p in zip(found, planted, strict=True)]
    sys.stdout.write(report(named))
    if options.output is not None:
        write_json(options.output, {
            "episodes": options.episodes, "seed": options.seed,
            "cases": {n: {"env": CASES[n].env, "named": sum(v), "planted": len(v)}
                      for n, v in named.items()},
        })  # fmt: skip


def plant_all(case: Case, count: int, rng: np.random.Generator) -> list[Planted]:
    """Run `count` episodes with a mistake in each.

    Raises:
        RuntimeError: If an episode succeeds in spite of the mistake.
    """
    make_env = functools.partial(gym.make, case.env, **case.kwargs)
    env = make_env()
    plans: list[tuple[int, list[str], int]] = []
    task = 0
    while len(plans) < count and task < MAX_TRIES * count:
        env.reset(seed=task, options={"task": task})
        if (planned := case.plant(env.unwrapped, rng)) is not None:
            plans.append((task, *planned))
        task += 1
    env.close()
    taken = [0] * len(plans)

    def act(request: GenerationRequest) -> str:
        number = request.episode_id
        taken[number] += 1
        return plans[number][1][taken[number] - 1]

    rollout = Rollout(make_env, ScriptedPolicy(act))
    specs = [
        EpisodeSpec(task=task, seed=task, group_id=str(task), rng=np.random.default_rng(task))
        for task, _, _ in plans
    ]
    collected = rollout.collect(specs)
    rollout.close()
    if solved := [t.task_id for t in collected if t.success or not t.is_scorable]:
        raise RuntimeError(f"{case.env}: the planted mistake did not fail tasks {solved}")
    return [Planted(t, step) for t, (_, _, step) in zip(collected, plans, strict=True)]


def report(named: Mapping[str, Sequence[bool]]) -> str:
    """Return the share of named mistakes with Wilson's interval, as a table."""
    everything = [each for own in named.values() for each in own]
    rows = []
    for name, own in (*named.items(), ("**all**", everything)):
        if own:
            share = sum(own) / len(own)
            low, high = wilson_interval(share, len(own))
            rows.append([name, str(len(own)), str(sum(own)), f"{100 * share:.1f} %",
                         f"{100 * low:.1f} to {100 * high:.1f} %"])  # fmt: skip
    header = ["planted", "episodes", "named", "share", "95 % interval"]
    return f"{markdown_table(header, rows)}\n"


if __name__ == "__main__":
    main()
