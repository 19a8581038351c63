"""The checks of the conformance kit: `CHECKS` is the table of all."""

import contextlib
import io
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import Any, Final, Literal, get_args

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from agent_envs.core.command_line import counted
from agent_envs.core.messages import Role
from agent_envs.core.tool_env import ENDLESS, ToolEnv
from agent_envs.errors import ConformanceError, SnapshotError
from agent_envs.testing.episodes import (
    HOSTILE_ACTIONS,
    NOT_MADE,
    NotOffered,
    Problem,
    Subject,
    TextEnv,
    broken_actions,
    compare,
    expect,
    finish,
    halt,
    mistake,
    record,
    reference_actions,
    run_episode,
    step,
)
from agent_envs.testing.soundness import (
    check_answers,
    check_leaks,
    check_rewards,
    check_speed,
)

NUM_BROKEN_ACTIONS: Final = 25
HASH_SEEDS: Final = ("1", "2")
_CHILD: Final = "from agent_envs.testing.episodes import run_in_child; run_in_child()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of one check."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    detail: str
    """One line: an observation, the problem, or the reason for skipping."""


def check(make_env: str | Callable[[], TextEnv], **options: Any) -> list[Result]:
    """Run every check; see `run_checks` for the arguments.

    Raises:
        ConformanceError: If the environment breaks the contract; a line for each failed check.
    """
    results = list(run_checks(make_env, **options))
    if failures := [f"{r.name}: {r.detail}" for r in results if r.status == "failed"]:
        raise ConformanceError("\n".join(failures))
    return results


def run_checks(
    make_env: str | Callable[[], TextEnv],
    *,
    kwargs: Mapping[str, Any] | None = None,
    episodes: int = 3,
    seed: int = 0,
) -> Iterator[Result]:
    """Run every check of `CHECKS` and yield its result.

    Args:
        make_env: A Gymnasium id, with its module (``my_env:MyEnv-v0``) unless it is registered; or
            a callable that makes the environment.
        kwargs: Arguments of the environment, for an id.
        episodes: Number of tasks that the reference actions must solve.
        seed: Seed of the first episode and of the broken actions.
    """
    if isinstance(make_env, str):
        make_env = partial(gym.make, make_env, **(kwargs or {}))
    with make_env() as env:
        subject = Subject(make_env, env.spec, episodes, seed)
    for name, function in CHECKS.items():
        try:
            yield Result(name=name, status="ok", detail=function(subject))
        except NotOffered as reason:
            yield Result(name=name, status="skipped", detail=str(reason))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; its error is the result
            kind = "" if isinstance(error, Problem) else f"{type(error).__name__}: "
            yield Result(name=name, status="failed", detail=" ".join(f"{kind}{error}".split()))


def check_gymnasium(subject: Subject) -> str:
    """Gymnasium's checker neither raises nor warns."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("error")
        if subject.spec is None:
            warnings.filterwarnings("ignore", ".*alternative render modes.*")
        with subject.make() as env:
            check_env(env.unwrapped)
    return "check_env has no complaint"


def check_spec(subject: Subject) -> str:
    """The spec can be saved as JSON and makes the environment again."""
    if subject.spec is None:
        raise NotOffered("made without gym.make")
    try:
        text = subject.spec.to_json()
    except (TypeError, ValueError) as error:  # ValueError: a class as entry point
        raise NotOffered(f"the spec is no JSON: {error}") from None
    again = EnvSpec.from_json(text)
    again.make().close()
    return f"{again.id} survives JSON"


def check_info(subject: Subject) -> str:
    """``info`` is JSON and holds what policies and trainers need."""
    with subject.make() as env:
        _, info = env.reset(seed=subject.seed)
        for number, each in enumerate([info, *(o[4] for o in run_episode(env, subject.seed))]):
            place = f"step {number}" if number else "reset"
            _check_info(each, place)
            if number and isinstance(env.unwrapped, ToolEnv):
                problem = f"{place}: info['metrics'] holds no 'success'"
                expect("success" in each.get("metrics", {}), problem)
    return ", ".join(each)


def check_replay(subject: Subject) -> str:
    """The same seed and actions give the same bytes, also in a new environment."""
    with subject.make() as env, subject.make() as second:
        first = record(env, subject.seed)
        record(env, subject.seed + 1)
        compare(first, record(env, subject.seed), "when an environment is reset and run again")
        compare(first, record(second, subject.seed), "in a second environment")
    return "byte for byte, by seed"


def check_tasks(subject: Subject) -> str:
    """``reset(options={"task": n})`` selects task n for any seed, and refuses unknown tasks."""
    with subject.make() as env:
        if not hasattr(env.unwrapped, "num_tasks"):
            raise NotOffered("no num_tasks")
        num_tasks = env.unwrapped.num_tasks
        limit = ENDLESS if num_tasks is None else num_tasks
        ids = []
        for task in {0, limit - 1}:
            starts = [env.reset(seed=seed, options={"task": task}) for seed in (1, 2)]
            seen = {repr((observation, info.get("task_id"))) for observation, info in starts}
            expect(len(seen) == 1, f"task {task} changes with the seed")
            ids.append(starts[0][1].get("task_id"))
        for task in (-1, limit):
            is_refused = _raised(env.reset, options={"task": task}) is not None
            expect(is_refused, f"there is no task {task}, but reset begins it")
        expect(None in ids or len(ids) == len(set(ids)), f"several tasks have the id {ids[0]!r}")
    return "endless tasks" if num_tasks is None else counted(num_tasks, "task")


def check_reference(subject: Subject) -> str:
    """``reference_actions()`` solve their tasks."""
    num_solved = 0
    with subject.make() as env:
        for seed in range(subject.seed, subject.seed + subject.episodes):
            _, info = env.reset(seed=seed)
            actions = reference_actions(env)
            num_solved += bool(actions)
            for number, action in enumerate(actions, 1):
                _, _, terminated, truncated, info = step(env, action)
                place = f"seed {seed}, action {number} of {len(actions)}"
                expect(not truncated, f"{place} meets the turn limit")
                expect(terminated == (number == len(actions)), f"{place}: {terminated=}")
            success = info.get("metrics", {}).get("success", 1.0)
            expect(success == 1, f"seed {seed}: after the reference actions {success=}")
    if not num_solved:
        raise NotOffered("no reference_actions")
    return f"{counted(num_solved, 'task')} solved"


def check_turn_limit(subject: Subject) -> str:
    """The turn limit is Gymnasium's own and shows as ``truncated``."""
    if subject.spec is None:
        raise NotOffered("made without gym.make")
    with subject.make(max_episode_steps=2) as env:
        env.reset(seed=subject.seed)
        for is_last in (False, True):
            _, _, terminated, truncated, _ = step(env, mistake(env))
            if terminated:
                raise NotOffered("a mistake ends the episode")
            expect(truncated == is_last, f"max_episode_steps=2: {truncated=} when {is_last=}")
    limit = subject.spec.max_episode_steps
    if not limit:
        return "warning: there is none; register max_episode_steps="
    return counted(limit, "turn")


def check_any_text(subject: Subject) -> str:
    """No text raises or is an answer by accident, and feedback stays short."""
    with subject.make(max_episode_steps=-1) as env:
        env.reset(seed=subject.seed)
        base = env.unwrapped
        is_strict = isinstance(base, ToolEnv) and not base.action_format.is_structured
        broken = itertools.islice(broken_actions(env, subject.seed), NUM_BROKEN_ACTIONS)
        for number, action in enumerate([*HOSTILE_ACTIONS, *broken]):
            outcome = step(env, action)
            if is_strict and number < len(HOSTILE_ACTIONS):
                observation, _, terminated, _, info = outcome
                kind, shown = info["action"]["kind"], f"{action[:80]!r}"
                expect(kind != "answer", f"{shown} is taken for an answer")
                expect(not terminated or kind == "tool_call", f"{shown} ends the episode")
                expect(not info["metrics"].get("success"), f"{shown} is a success")
                is_last = info["messages"][-1]["content"] == observation
                expect(is_last, f"the last message is not the observation after {shown}")
            if outcome[2] or outcome[3]:
                env.reset(seed=subject.seed)
    return f"{number + 1} hostile and broken actions"


def check_misuse(subject: Subject) -> str:
    """A step before reset and an action that is not text are programming errors."""
    with subject.make() as env:
        early = _raised(env.step, "hm")
        problem = f"step before reset raises {early!r}, not gymnasium.error.ResetNeeded"
        expect(isinstance(early, gym.error.ResetNeeded), problem)
        env.reset(seed=subject.seed)
        expect(_raised(env.step, 7) is not None, "step(7) raises nothing")
    return "step before reset raises, and step(7)"


def check_snapshots(subject: Subject) -> str:
    """An episode continues alike from a snapshot."""
    with subject.make() as env:
        base: Any = env.unwrapped
        if not hasattr(base, "snapshot"):
            raise NotOffered("no snapshot and restore")
        for share in (0, 2 / 3, 1):
            actions, snapshot = halt(env, subject.seed, share)
            expected = finish(env, actions)
            base.restore(snapshot)
            compare(expected, finish(env, actions), "when continued from a snapshot")
    return f"{len(pickle.dumps(snapshot))} bytes at the end"


def check_processes(subject: Subject) -> str:
    """Another process, with other string hashes, gives the same bytes, also from a snapshot."""
    saved, expected = None, {}
    seeds = range(subject.seed, subject.seed + subject.episodes)
    with subject.make() as env:
        shown = [record(env, seed) for seed in seeds]
        if hasattr(env.unwrapped, "snapshot"):
            with contextlib.suppress(SnapshotError):  # check_snapshots reports it
                saved = halt(env, subject.seed, 2 / 3)
                expected = finish(env, saved[0])
    try:
        payload = pickle.dumps((subject.make_env, seeds, saved))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotOffered(f"cannot be sent to another process: {error}") from None
    with ThreadPoolExecutor() as pool:  # two, because the order of two words is often the same
        children = list(pool.map(partial(_run_child, payload), HASH_SEEDS))
    for status, output, errors in children:
        complaint = (errors.splitlines() or [""])[-1]
        if status == NOT_MADE:
            raise NotOffered(f"another process cannot make it: {complaint}")
        expect(status == 0, f"fails in another process: {complaint}")
        there, rest = json.loads(output.splitlines()[-1])
        for here, other in zip(shown, there, strict=True):
            compare(here, other, "in a process with other hashes")
        compare(expected, rest, "when another process continues from a snapshot")
    return "byte for byte, with other values of PYTHONHASHSEED"


def _run_child(payload: bytes, hash_seed: str) -> tuple[int, str, str]:
    """Return the exit status, the output and the errors of a check in another process.

    They go to files: a process that the environment leaves would keep pipes open.
    """
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
        "PYTHONHASHSEED": hash_seed,
    }
    command = [sys.executable, "-P", "-c", _CHILD]
    open_file = partial(TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with open_file() as output, open_file() as errors:
        child = subprocess.run(  # noqa: S603
            command, input=payload, stdout=output, stderr=errors, check=False, env=variables
        )
        output.seek(0)
        errors.seek(0)
        return child.returncode, output.read(), errors.read()


CHECKS: Final[Mapping[str, Callable[[Subject], str]]] = {
    "gymnasium": check_gymnasium,
    "spec": check_spec,
    "info": check_info,
    "replay": check_replay,
    "tasks": check_tasks,
    "reference actions": check_reference,
    "turn limit": check_turn_limit,
    "any text": check_any_text,
    "misuse": check_misuse,
    "snapshots": check_snapshots,
    "processes": check_processes,
    "rewards": check_rewards,
    "answers": check_answers,
    "speed": check_speed,
    "leaks": check_leaks,
}


def _raised(function: Callable[..., Any], *arguments: Any, **options: Any) -> Exception | None:
    try:
        function(*arguments, **options)
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None


def _check_info(info: dict[str, Any], place: str) -> None:
    raised = _raised(json.dumps, info)
    expect(raised is None, f"{place}: info is not JSON: {raised}")
    messages: Any = info.get("messages")
    is_chat = bool(messages) and all(
        message.get("role") in get_args(Role) and isinstance(message.get("content"), str)
        for message in messages
    )
    form = "a list of {'role': ..., 'content': a str}"
    expect(is_chat, f"{place}: info['messages'] must be {form}, not {messages!r:.100}")
    are_schemas = all(
        {"name", "description", "parameters"} <= set(tool.get("function", {}))
        for tool in info.get("tools", [])
    )
    expect(are_schemas, f"{place}: info['tools'] are no OpenAI schemas: {info.get('tools')}")
    task_id = info.get("task_id", "")
    expect(isinstance(task_id, str), f"{place}: info['task_id'] is {task_id!r}, not a str")
    for name, value in info.get("metrics", {}).items():
        is_number = isinstance(value, int | float) and math.isfinite(value)
        expect(is_number, f"{place}: info['metrics'][{name!r}] is {value!r}, not a number")
