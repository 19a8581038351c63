"""Agents that play a task several times: Reflexion, and the majority of several samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from agent_envs.errors import ServerError
from agent_leaderboard.agents.agent import PlayedEpisode
from agent_trainers.policies import GenerationRequest, Policy, PolicyWrapper, Usage
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.evaluation import choose_by_majority
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
    model: Policy, collect: Collect, specs: Sequence[EpisodeSpec], *, trials: int
) -> list[PlayedEpisode]:
    """Play up to `trials` times, with the model's notes on what failed (arXiv 2303.11366).

    That it failed is what the environment says (its metric ``success``), as in the paper: an agent
    with this knowledge is not to be compared with agents without it as if they were alike. The last
    attempt counts; the earlier ones are kept as attempts.
    """
    tasks = waiting = [_Task(spec) for spec in specs]
    for trial in range(trials):
        if trial > 0:
            # What failed through a fault says nothing about the task; whoever asked plays it again.
            failed = [task for task in waiting if task.has_failed]
            waiting = _reflect(model, failed) if failed else []
        if not waiting:
            break
        reminded = _Reminded(model, [task.lessons for task in waiting])
        played = collect(reminded, [task.spec for task in waiting])
        for task, trajectory in zip(waiting, played, strict=True):
            task.attempts.append(trajectory)
    return [
        PlayedEpisode(
            trajectory=task.attempts[-1],
            attempts=tuple(task.attempts[:-1]),
            usage=total_usage(task.attempts) + task.reflecting,
        )
        for task in tasks
    ]


def play_best_of(
    model: Policy, collect: Collect, specs: Sequence[EpisodeSpec], *, samples: int
) -> list[PlayedEpisode]:
    """Play each task `samples` times; the answer given most often counts (self-consistency).

    Wang et al., arXiv 2203.11171. The vote knows nothing of the right answer. Of several answers
    given equally often the one given first counts, and where no sample answered, the first sample.
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
    for tried in zip(*rounds, strict=True):
        chosen = choose_by_majority(tried)
        others = tuple(trajectory for k, trajectory in enumerate(tried) if k != chosen)
        episodes.append(
            PlayedEpisode(trajectory=tried[chosen], attempts=others, usage=total_usage(tried))
        )
    return episodes


def total_usage(attempts: Sequence[Trajectory]) -> Usage:
    """Return what the actions of some attempts took together."""
    return sum((Usage(**attempt.usage) for attempt in attempts), Usage())


@dataclass(slots=True)
class _Task:
    """A task that is played again and again."""

    spec: EpisodeSpec
    attempts: list[Trajectory] = field(default_factory=list)
    lessons: list[str] = field(default_factory=list)
    """What the model noted about its failures."""
    reflecting: Usage = field(default_factory=Usage)
    """What noting it took."""

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt was not successful, and no fault ended it."""
        return self.attempts[-1].is_scorable and not self.attempts[-1].success


class _Reminded(PolicyWrapper):
    """Shows the model what it noted about its failures."""

    def __init__(self, model: Policy, lessons: Sequence[Sequence[str]]) -> None:
        super().__init__(model)
        self._lessons = lessons  # by episode

    def before(self, request: GenerationRequest) -> GenerationRequest:
        if not (lessons := self._lessons[request.episode_id]):
            return request
        notes = "\n".join([LESSONS_TEXT, *(f"- {lesson}" for lesson in lessons)])
        messages = list(request.messages)
        place = next(i for i, message in enumerate(messages) if message["role"] == "user")
        content = f"{messages[place]['content']}\n\n{notes}"
        messages[place] = {**messages[place], "content": content}
        # Its tokens are not those of the state before, which the notes were no part of.
        return replace(request, messages=messages, previous=None)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        return self.policy.encode(self.before(request))


def _reflect(model: Policy, tasks: Sequence[_Task]) -> list[_Task]:
    """Let the model note what went wrong; return the tasks for which it could."""
    requests = [
        GenerationRequest(
            episode_id=i,
            messages=[
                {"role": "system", "content": REFLECT_TEXT},
                {"role": "user", "content": transcript(task.attempts[-1])},
            ],
            tools=None,
            previous=None,
            rng=task.spec.rng,
        )
        for i, task in enumerate(tasks)
    ]
    try:
        generations = model.generate(requests)
    except ServerError as error:
        if len(tasks) > 1:  # one at a time, so that an error costs one task only
            return [kept for task in tasks for kept in _reflect(model, [task])]
        tasks[0].attempts.append(_not_begun(tasks[0].attempts[-1], str(error)))
        return []
    for task, generation in zip(tasks, generations, strict=True):
        task.reflecting += generation.spent
        if lesson := generation.text.strip():
            task.lessons.append(lesson)
    return list(tasks)


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


def _not_begun(before: Trajectory, error: str) -> Trajectory:
    """Return the attempt that was to follow `before`, and for which there is no reflection."""
    return replace(
        before,
        transitions=[],
        metrics={},
        timings={},
        stop_reason=StopReason.POLICY_ERROR,
        error=error,
        usage={},
        final_prompt_ids=[],
    )
