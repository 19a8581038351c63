"""Agents that attempt a task several times: Reflexion, and the majority of several samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from agent_envs.errors import ServerError
from agent_leaderboard.agents.agent import PlayedEpisode, total_usage
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


def with_reflection(
    model: Policy, collect: Collect, specs: Sequence[EpisodeSpec], *, trials: int
) -> list[PlayedEpisode]:
    """Attempt tasks up to `trials` times, with reflections on failures (arXiv 2303.11366).

    The environment's metric ``success`` tells the agent that it failed, as in the paper, so it is
    not comparable with agents without this knowledge. The last attempt counts.
    """
    tasks = waiting = [_Task(spec) for spec in specs]
    for trial in range(trials):
        if trial > 0:
            # Infrastructure failures are retried by the caller.
            failed = [task for task in waiting if task.has_failed]
            waiting = _reflect(model, failed) if failed else []
        if not waiting:
            break
        reminded = _Reminded(model, [task.lessons for task in waiting])
        trajectories = collect(reminded, [task.spec for task in waiting])
        for task, trajectory in zip(waiting, trajectories, strict=True):
            task.attempts.append(trajectory)
    return [
        PlayedEpisode(
            trajectory=task.attempts[-1],
            attempts=tuple(task.attempts[:-1]),
            usage=total_usage(task.attempts) + task.reflection_usage,
        )
        for task in tasks
    ]


def best_of(
    model: Policy, collect: Collect, specs: Sequence[EpisodeSpec], *, samples: int
) -> list[PlayedEpisode]:
    """Attempt each task `samples` times; the most frequent answer counts (arXiv 2203.11171).

    Ties go to the answer given first; without any answer, the first sample counts.
    """
    rounds: list[list[Trajectory]] = []
    generators = [spec.rng.integers(2**32, size=(samples, 4)) for spec in specs]
    for k in range(samples):
        seeds = [np.random.default_rng(own[k]) for own in generators]
        rounds.append(
            collect(model, [replace(s, rng=rng) for s, rng in zip(specs, seeds, strict=True)])
        )
    episodes = []
    for tried in zip(*rounds, strict=True):
        chosen = choose_by_majority(tried)
        others = tuple(trajectory for k, trajectory in enumerate(tried) if k != chosen)
        episodes.append(
            PlayedEpisode(trajectory=tried[chosen], attempts=others, usage=total_usage(tried))
        )
    return episodes


@dataclass(slots=True)
class _Task:
    """A task with its attempts."""

    spec: EpisodeSpec
    attempts: list[Trajectory] = field(default_factory=list)
    lessons: list[str] = field(default_factory=list)
    """Reflections of the model on its failures."""
    reflection_usage: Usage = field(default_factory=Usage)

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed, other than by an infrastructure failure."""
        return self.attempts[-1].is_scorable and not self.attempts[-1].success


class _Reminded(PolicyWrapper):
    """Shows the model its reflections."""

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
        # The notes were not part of the previous state, so its tokens cannot be continued.
        return replace(request, messages=messages, previous=None)

    def encode(self, request: GenerationRequest) -> list[int] | None:
        return self.policy.encode(self.before(request))


def _reflect(model: Policy, tasks: Sequence[_Task]) -> list[_Task]:
    """Ask the model why it failed; return the tasks with a reflection."""
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
        if len(tasks) > 1:  # one at a time: an error costs one task only
            return [kept for task in tasks for kept in _reflect(model, [task])]
        (task,) = tasks
        task.attempts.append(replace(
            task.attempts[-1], transitions=[], metrics={}, timings={}, usage={},
            stop_reason=StopReason.POLICY_ERROR, error=str(error), final_prompt_ids=[],
        ))  # fmt: skip
        return []
    for task, generation in zip(tasks, generations, strict=True):
        task.reflection_usage += generation.spent
        if lesson := generation.text.strip():
            task.lessons.append(lesson)
    return list(tasks)


def transcript(trajectory: Trajectory) -> str:
    """Write an attempt as text for the model."""
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
