"""Agents that play a task several times: Reflexion, and the majority of several samples."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ServerError
from agent_envs.scoring.answers import normalize_answer
from agent_leaderboard.agents.agent import PlayedEpisode
from agent_trainers.policies import Generation, GenerationRequest, Policy, Usage
from agent_trainers.policies.usage import MeteredPolicy
from agent_trainers.rollout.collector import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory

MAX_OBSERVATION_CHARS: Final = 1_000
REFLECT_TEXT: Final = (
    "You learn from your mistakes. Below is an attempt at a task, which was not successful. In a "
    "few sentences, say why it probably failed, and make a short new plan that avoids the same "
    "failure."
)
LESSONS_TEXT: Final = "You have tried this before, and failed. What you noted then:"

Collect = Callable[[Policy, Sequence[EpisodeSpec]], list[Trajectory]]


def play_with_reflection(
    model: MeteredPolicy, collect: Collect, specs: Sequence[EpisodeSpec], *, trials: int
) -> list[PlayedEpisode]:
    """Play, and again where it failed, with the model's notes (Shinn et al., arXiv 2303.11366).

    That it failed is what the environment says (its metric ``success``), as in the paper: an agent
    with this knowledge is not to be compared with agents without it as if they were alike. The last
    attempt counts; the earlier ones are kept as attempts.

    Args:
        model: Who plays and reflects.
        collect: Plays episodes.
        specs: What to play.
        trials: Attempts at a task, at most.
    """
    memory = _Memory(model)
    attempts: list[list[Trajectory]] = [[] for _ in specs]
    waiting = list(range(len(specs)))
    for trial in range(trials):
        played = collect(memory, [specs[i] for i in waiting])
        for i, trajectory in zip(waiting, played, strict=True):
            attempts[i].append(trajectory)
        # What failed through a fault says nothing about the task; whoever asked plays it again.
        waiting = [i for i in waiting if _may_be_tried_again(attempts[i][-1])]
        if not waiting or trial == trials - 1:
            break
        errors = memory.reflect([(specs[i], attempts[i][-1]) for i in waiting])
        for i, error in zip(waiting, errors, strict=True):
            if error is not None:
                attempts[i].append(_not_begun(attempts[i][-1], error))
        waiting = [i for i, error in zip(waiting, errors, strict=True) if error is None]
    return [
        PlayedEpisode(trajectory=tried[-1], attempts=tuple(tried[:-1]), usage=model.usage(spec.rng))
        for spec, tried in zip(specs, attempts, strict=True)
    ]


def play_best_of(
    model: MeteredPolicy, collect: Collect, specs: Sequence[EpisodeSpec], *, samples: int
) -> list[PlayedEpisode]:
    """Play each task several times; the answer given most often counts (self-consistency).

    Wang et al., arXiv 2203.11171. The vote knows nothing of the right answer. Of several answers
    given equally often the one given first counts, and where no sample answered, the first sample.

    Args:
        model: Who plays.
        collect: Plays episodes.
        specs: What to play.
        samples: Attempts at a task.
    """
    generators = [
        [np.random.default_rng(spec.rng.integers(2**32, size=4)) for _ in range(samples)]
        for spec in specs
    ]
    rounds = []
    for k in range(samples):
        own = [replace(s, rng=rngs[k]) for s, rngs in zip(specs, generators, strict=True)]
        rounds.append(collect(model, own))
    episodes = []
    for i, rngs in enumerate(generators):
        tried = [played[i] for played in rounds]
        chosen = choose_by_majority(tried)
        others = tuple(trajectory for k, trajectory in enumerate(tried) if k != chosen)
        usage = sum((model.usage(rng) for rng in rngs), Usage())
        episodes.append(PlayedEpisode(trajectory=tried[chosen], attempts=others, usage=usage))
    return episodes


def choose_by_majority(attempts: Sequence[Trajectory]) -> int:
    """Return which attempt counts: the first with the answers given most often.

    An attempt that a fault ended is returned before all: then the vote is not complete.
    """
    for k, attempt in enumerate(attempts):
        if attempt.error is not None:
            return k
    answers = [_answers(attempt) for attempt in attempts]
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0
    # most_common keeps the order of the first vote where counts are equal
    (winner, _), *_ = votes.most_common(1)
    return answers.index(winner)


class _Memory:
    """A policy that shows the model what it noted about its failures, by episode."""

    def __init__(self, model: Policy) -> None:
        self._model = model
        self._lessons: dict[np.random.Generator, list[str]] = {}

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        return self._model.generate([self._remind(request) for request in requests])

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> int:
        return self._model.count_tokens(messages, tools)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        return self._model.encode(self._remind(request))

    @property
    def is_concurrent(self) -> bool:
        return bool(getattr(self._model, "is_concurrent", False))

    @property
    def max_concurrency(self) -> int:
        return int(getattr(self._model, "max_concurrency", 1))

    def reflect(self, failed: Sequence[tuple[EpisodeSpec, Trajectory]]) -> list[str | None]:
        """Let the model note what went wrong; return the error of the server, for each."""
        requests = [
            GenerationRequest(
                messages=[
                    {"role": "system", "content": REFLECT_TEXT},
                    {"role": "user", "content": transcript(trajectory)},
                ],
                tools=None,
                previous=None,
                rng=spec.rng,
            )
            for spec, trajectory in failed
        ]
        try:
            self._note(requests)
        except ServerError:
            return [self._note_alone(request) for request in requests]
        return [None] * len(requests)

    def _note(self, requests: Sequence[GenerationRequest]) -> None:
        for request, generation in zip(requests, self._model.generate(requests), strict=True):
            if lesson := generation.text.strip():
                self._lessons.setdefault(request.rng, []).append(lesson)

    def _note_alone(self, request: GenerationRequest) -> str | None:
        """Ask again, so that an error costs one episode only."""
        try:
            self._note([request])
        except ServerError as error:
            return str(error)
        return None

    def _remind(self, request: GenerationRequest) -> GenerationRequest:
        if not (lessons := self._lessons.get(request.rng)):
            return request
        notes = "\n".join([LESSONS_TEXT, *(f"- {lesson}" for lesson in lessons)])
        messages = list(request.messages)
        place = next(i for i, message in enumerate(messages) if message["role"] == "user")
        content = f"{messages[place]['content']}\n\n{notes}"
        messages[place] = {**messages[place], "content": content}
        # Its tokens are not those of the state before, which the notes were no part of.
        return replace(request, messages=messages, previous=None)


def transcript(trajectory: Trajectory) -> str:
    """Write an attempt down for the model."""
    question = trajectory.transitions[0].messages
    lines = [f"Task: {next(m['content'] for m in question if m['role'] == 'user')}"]
    for step in trajectory.transitions:
        lines.append(f"You: {step.action}")
        understood = step.info.get("action", {})
        said = step.info.get("tool_result") or understood.get("message")
        if said:
            is_long = len(said) > MAX_OBSERVATION_CHARS
            lines.append(f"Result: {said[:MAX_OBSERVATION_CHARS]}{' …' if is_long else ''}")
    lines.append(f"It ended so: {trajectory.stop_reason.value.replace('_', ' ')}, without success.")
    return "\n".join(lines)


def _may_be_tried_again(attempt: Trajectory) -> bool:
    return attempt.is_scorable and not attempt.success


def _not_begun(before: Trajectory, error: str) -> Trajectory:
    """Return the attempt that was to follow `before`, and for which there is no reflection."""
    return replace(
        before,
        transitions=[],
        metrics={},
        timings={},
        stop_reason=StopReason.POLICY_ERROR,
        error=error,
        final_prompt_ids=[],
    )


def _answers(trajectory: Trajectory) -> tuple[str, ...]:
    """Return what was answered, in the form in which answers are compared."""
    actions = (step.info.get("action", {}) for step in trajectory.transitions)
    return tuple(normalize_answer(a["answer"]) for a in actions if a.get("kind") == "answer")
