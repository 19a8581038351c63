"""Run the checks, and say what each found."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import gymnasium as gym

from agent_envs.errors import ConformanceError
from agent_envs.testing.checks import CHECKS
from agent_envs.testing.episodes import NotOffered, Problem, TextEnv, make_subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check found."""

    name: str
    status: Literal["ok", "failed", "skipped"]
    detail: str
    """One line: what was seen, what is wrong, or why there was nothing to check."""


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
    """Run every check of `CHECKS` and yield what each found.

    Args:
        make_env: A Gymnasium id, with its module in front (``my_env:MyEnv-v0``) unless it is
            registered already; or a callable that makes the environment.
        kwargs: Arguments of the environment, for an id.
        episodes: How many tasks the reference actions must solve in each tool format.
        seed: Seed of the first episode and of the broken actions.

    Raises:
        ConfigurationError: If what is made is no Gymnasium environment. Whatever the environment
            raises while it is made passes through.
    """
    if isinstance(make_env, str):
        make_env = partial(gym.make, make_env, **(kwargs or {}))
    subjects = make_subjects(make_env, episodes, seed)
    for name, function, is_per_format in CHECKS:
        details: list[str] = []
        for subject in subjects if is_per_format else subjects[:1]:
            try:
                details.append(function(subject))
            except NotOffered as reason:
                yield Result(name=name, status="skipped", detail=str(reason))
                break
            except Exception as error:  # noqa: BLE001 - foreign code; its error is the result
                place = "" if subject is subjects[0] else f"tool_format={subject.tool_format!r}: "
                kind = "" if isinstance(error, Problem) else f"{type(error).__name__}: "
                text = " ".join(f"{place}{kind}{error}".split())
                yield Result(name=name, status="failed", detail=text)
                break
        else:
            yield Result(name=name, status="ok", detail=details[0])
