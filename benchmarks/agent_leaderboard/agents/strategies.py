"""Strategies on a model: search by a plan, and several attempts at a task.

A search strategy is a policy that calls the search tool by a plan, with a model for the text.
Reflexion, and the majority of several samples, attempt a task several times.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from agent_envs.core.messages import Message
from agent_envs.errors import ServerError
from agent_envs.formats.actions import without_thoughts
from agent_envs.formats.tool_formats import ToolFormat
from agent_leaderboard.agents.agent import PlayedEpisode, total_usage
from agent_trainers.policies import Generation, GenerationRequest, Policy, PolicyWrapper, Usage
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.rollout.evaluation import choose_by_majority
from agent_trainers.trajectory import StopReason, Trajectory

_ANSWER_TAG: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_TAG: Final = re.compile(r"</?\w+>")

RAG_TEXT: Final = (
    "Answer the question with the help of the passages. Reply with nothing but the answer, in as "
    "few words as possible. If the passages do not tell, give your best guess."
)
ITERATIVE_RAG_TEXT: Final = (
    "Answer the question with the help of the passages. Think step by step, in a few sentences, "
    'and end with "So the answer is:" and the answer in as few words as possible.'
)
SO_THE_ANSWER: Final = re.compile(r"so the answer is:?(.*)", re.IGNORECASE | re.DOTALL)


@dataclass(slots=True)
class Talk:
    """State of a strategy on the current question."""

    question: str
    passages: str | None = None
    """Those found last."""
    num_searches: int = 0


class SearchStrategy(PolicyWrapper):
    """Naive RAG, one search with the question; with `iterations`, Iter-RetGen.

    Iter-RetGen (Shao et al., arXiv 2305.15294) searches and answers several times: answer and
    question are the next query, and the last answer counts.
    """

    def __init__(
        self, model: Policy, tool_format: ToolFormat, *, iterations: int | None = None
    ) -> None:
        """Use `model`, and write actions in the environment's tool format."""
        super().__init__(model)
        self._format = tool_format
        self._iterations = iterations
        self._talks: dict[int, Talk] = {}  # by episode

    def before(self, request: GenerationRequest) -> GenerationRequest | Generation:
        """Search for the question, or return the prompt of the model."""
        observation = request.messages[-1]["content"]
        if not any(message["role"] == "assistant" for message in request.messages):
            # A new question: the first, or the next of an episode with several.
            self._talks[request.episode_id] = Talk(observation)
        talk = self._talks[request.episode_id]
        if talk.num_searches == 0:
            return Generation(text=self._search(talk, talk.question), usage=Usage())
        talk.passages = talk.passages or observation  # later ones are about mistakes
        shown = f"Passages:\n{talk.passages}\n\nQuestion: {talk.question}\nAnswer:"
        task = RAG_TEXT if self._iterations is None else ITERATIVE_RAG_TEXT
        messages: list[Message] = [
            {"role": "system", "content": task}, {"role": "user", "content": shown}
        ]  # fmt: skip
        return replace(request, messages=messages, tools=None, previous=None)

    def after(self, request: GenerationRequest, generation: Generation) -> Generation:
        """Search with the model's reply and the question, or answer."""
        if generation.finish_reason == "overflow":
            return generation
        talk, reply = self._talks[request.episode_id], without_thoughts(generation.text).strip()
        if talk.num_searches < (self._iterations or 1):
            return replace(generation, text=self._search(talk, f"{reply} {talk.question}".strip()))
        said = SO_THE_ANSWER.search(reply)
        answer = short_answer(said.group(1).strip() if said else reply)
        text = self._format.write_answer(_TAG.sub("", answer).strip())
        return replace(generation, text=text)

    def _search(self, talk: Talk, query: str) -> str:
        talk.num_searches += 1
        talk.passages = None
        return self._format.write_call("search", {"query": query})

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return no tokens: the model's prompt is not the environment's state."""
        return []


def short_answer(text: str) -> str:
    """Extract the answer from a reply."""
    if tagged := _ANSWER_TAG.search(text):
        return tagged.group(1).strip()
    answer = re.sub(r"^\s*(the )?(final )?answer( is)?\s*:?\s+", "", text, flags=re.IGNORECASE)
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return lines[0] if lines else ""


# Several attempts

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
    attempts: list[list[Trajectory]] = [[] for _ in specs]
    lessons: list[list[str]] = [[] for _ in specs]
    usage = [Usage() for _ in specs]
    waiting = list(range(len(specs)))
    for trial in range(trials):
        if trial > 0:
            last = {i: attempts[i][-1] for i in waiting}
            # Infrastructure failures are retried by the caller.
            waiting = [i for i, one in last.items() if one.is_scorable and not one.success]
            if not waiting:
                break
            try:
                replies = model.generate([_reflection(last[i], specs[i], i) for i in waiting])
            except ServerError as error:
                for i in waiting:
                    attempts[i].append(replace(
                        last[i], transitions=[], metrics={}, timings={}, usage={}, error=str(error),
                        stop_reason=StopReason.POLICY_ERROR, final_prompt_ids=[],
                    ))  # fmt: skip
                break
            for i, reply in zip(waiting, replies, strict=True):
                usage[i] += reply.spent
                lessons[i] += filter(None, [reply.text.strip()])
        reminded = _Reminded(model, [lessons[i] for i in waiting])
        trajectories = collect(reminded, [specs[i] for i in waiting])
        for i, trajectory in zip(waiting, trajectories, strict=True):
            attempts[i].append(trajectory)
    return [
        PlayedEpisode(trajectory=own[-1], attempts=tuple(own[:-1]), usage=total_usage(own) + spent)
        for own, spent in zip(attempts, usage, strict=True)
    ]


def _reflection(attempt: Trajectory, spec: EpisodeSpec, episode_id: int) -> GenerationRequest:
    messages: list[Message] = [
        {"role": "system", "content": REFLECT_TEXT},
        {"role": "user", "content": transcript(attempt)},
    ]
    return GenerationRequest(
        episode_id=episode_id, messages=messages, tools=None, previous=None, rng=spec.rng
    )


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
