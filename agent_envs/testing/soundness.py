"""Checks for defects that one episode does not show: in rewards, questions, time and resources."""

import os
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from agent_envs.core.tool_env import ToolEnv
from agent_envs.testing.episodes import (
    NotOffered,
    Subject,
    compare,
    expect,
    mistake,
    record,
    reference_actions,
    run_episode,
    step,
    tool_calls,
)
from agent_envs.testing.ways import find_detour, play_ways

MORE_TURNS: Final = 2
NUM_QUESTIONS: Final = 8
WRONG: Final = "nothing of the kind"
NUM_ROUNDS: Final = 48
MIN_ROUNDS: Final = 8
SECONDS: Final = 3.0
SLOWER: Final = 3.0
SLACK_SECONDS: Final = 0.005
NUM_EPISODES: Final = 3
GRACE_SECONDS: Final = 2.0


def check_rewards(subject: Subject) -> str:
    """No detour or failure returns more than the shortest solution (see `find_detour`)."""
    with subject.make() as env:
        env.reset(seed=subject.seed)
        num_actions = len(reference_actions(env))
    with subject.make(max_episode_steps=num_actions + MORE_TURNS) as env:
        plays = play_ways(env, subject.seed) if num_actions else []
    if not plays:
        raise NotOffered("no ToolEnv with reference_actions")
    detour = find_detour(plays)
    expect(detour is None, f"seed {subject.seed}: {detour}")
    return f"{len(plays)} probes, none pays more than the shortest solution"


def check_answers(subject: Subject) -> str:
    """Questions do not state their answers in a fixed place, and wrong answers do not succeed."""
    found: list[set[tuple[str, str]]] = []
    answers: set[str] = set()
    with subject.make() as env:
        base: Any = env.unwrapped
        for seed in range(subject.seed, subject.seed + NUM_QUESTIONS):
            _, info = env.reset(seed=seed)
            if not isinstance(base, ToolEnv) or not base.task.answers:
                raise NotOffered("no answers")
            texts = (message["content"] for message in info["messages"])
            question = _words(" ".join(texts))
            found.append(set().union(*(_places(question, a) for a in base.task.answers)))
            answers.update(base.task.answers)
        answer = base.task.answers[0]
        wrong = [base.task.question, WRONG, f"{answer} or {WRONG}"]
        for text in [*wrong, answer[0]] if answer[1:].isalnum() else wrong:
            env.reset(seed=seed)
            *_, info = step(env, base.write_answer(text))
            is_right = info.get("metrics", {}).get("success") == 1
            expect(not is_right, f"{text!r:.80} is right where the answer is {answer!r:.80}")
    places = sorted(set.intersection(*found)) if len(answers) > 1 else []
    around = " and ".join(f"{side} {word!r}" for side, word in places[:2])
    expect(not places, f"each of {NUM_QUESTIONS} questions states its answer, {around}")
    return f"{sum(map(bool, found))} of {NUM_QUESTIONS} questions contain their answers"


def check_speed(subject: Subject) -> str:
    """Steps do not become slower and slower, and leave nothing for the next episode.

    A used environment is timed in turns with a new one, so that both see the same load of the
    machine. What slows down all environments of the process, shows in its CPU time.
    """
    seconds: list[float] = []
    with subject.make(max_episode_steps=-1) as env, subject.make(max_episode_steps=-1) as new:
        expected = record(new, subject.seed)
        actions = [mistake(new), *tool_calls(new)]
        env.reset(seed=subject.seed)
        started = time.monotonic()
        while len(seconds) < NUM_ROUNDS and time.monotonic() < started + SECONDS:
            seconds.append(_seconds(time.process_time, env, actions, subject.seed))
        is_short = len(seconds) < MIN_ROUNDS
        rounds = 0 if is_short else MIN_ROUNDS
        new.reset(seed=subject.seed)
        pairs = [
            [_seconds(time.monotonic, each, actions, subject.seed) for each in (new, env)]
            for _ in range(rounds)
        ]
        compare(expected, record(env, subject.seed), f"after {len(seconds)} rounds of calls")
    if is_short:
        return f"only {len(seconds)} rounds of calls in {SECONDS:g} s; too few to compare"
    quarter = len(seconds) // 4
    for first, last in ((seconds[:quarter], seconds[-quarter:]), zip(*pairs, strict=True)):
        medians = [statistics.median(each) / len(actions) for each in (first, last)]
        texts = (f"{1000 * each:.2g} ms" for each in medians)
        text = f"a step takes {' at first, and later '.join(texts)}"
        expect(medians[1] <= SLOWER * medians[0] + SLACK_SECONDS, text)
    return text


def _seconds(clock: Callable[[], float], env: Any, actions: Sequence[Any], seed: int) -> float:
    """Return what a round of calls takes, without the resets after its ends."""
    seconds = 0.0
    for action in actions:
        before = clock()
        outcome = step(env, action)
        seconds += clock() - before
        if outcome[2] or outcome[3]:
            env.reset(seed=seed)
    return seconds


def check_leaks(subject: Subject) -> str:
    """Closed environments leave no threads, processes, open files and global state."""
    _use(subject)  # pools, sandboxes and data that all environments of a process share
    before = _resources()
    states = []  # of `random` and of NumPy
    for _ in range(NUM_EPISODES):
        _use(subject)
        states.append((random.random(), np.random.random()))  # noqa: S311, NPY002
    deadline = time.monotonic() + GRACE_SECONDS
    while (leaked := _leaked(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    expect(not leaked, f"{NUM_EPISODES} closed environments leave {leaked}")
    are_free = all(len(set(draws)) > 1 for draws in zip(*states, strict=True))
    expect(are_free, "an episode seeds the generators of the process")
    expect(os.getcwd() == subject.folder, "an episode changes the current folder")  # noqa: PTH109
    return "no thread and no open file"


def _use(subject: Subject) -> None:
    with subject.make() as env:
        env.reset(seed=subject.seed)
        list(run_episode(env, subject.seed))
        env.reset(seed=subject.seed)
        for action in tool_calls(env)[:1]:
            step(env, action)


def _resources() -> dict[str, int]:
    folder = "/proc/self/fd"  # elsewhere only threads are counted
    files = len(os.listdir(folder)) if os.path.isdir(folder) else 0  # noqa: PTH112, PTH208
    children = [p.read_text().split() for p in Path("/proc/self/task").glob("*/children")]
    num_children = sum(map(len, children))
    return {"threads": threading.active_count(), "processes": num_children, "open files": files}


def _leaked(before: dict[str, int]) -> str:
    more = {name: count - before[name] for name, count in _resources().items()}
    return ", ".join(f"{n} {name}" for name, n in more.items() if n >= NUM_EPISODES)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text.casefold())


def _places(question: list[str], answer: str) -> set[tuple[str, str]]:
    """Return the words right before and after an answer in a question."""
    words = _words(answer)
    size, padded = len(words), ["", *question, ""]
    places = set()
    for i in range(1, len(padded) - size if words else 0):
        if padded[i : i + size] == words:
            places |= {("after", padded[i - 1]), ("before", padded[i + size])}
    return places
