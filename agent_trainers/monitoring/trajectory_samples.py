"""Sample trajectories with the numbers of their training: tokens, rows, advantages."""

import difflib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_envs.core.messages import Message
from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.trajectory import Trajectory, Transition

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    """This process's share of a generation batch, with its training tensors."""

    trajectories: Sequence[Trajectory]
    """The episodes; `Row.episode` is an index into it."""
    rows: Sequence[Row]
    """Their rows, without padding rows."""
    tensors: Mapping[str, Any]
    """The batch as trained, (B, ...): the rows in order, then padding rows."""
    advantages: Sequence[Floats] = ()
    """The estimator's advantages of each trajectory, per step or per token."""
    episodes: Sequence[EpisodeSummary] = ()
    """The episodes of all processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """The action tokens of one step, each list of shape (len(completion_ids),)."""

    row: int
    """Which of its trajectory's rows contains the step, from 0."""
    fork_reason: str | None
    """Why a later step starts a new row; None if it does not."""
    is_trained: list[bool]
    advantages: list[float]
    values: list[float] | None
    """The critic's value before each token; None without a critic."""
    ratios: list[float] | None
    """Probability of each token in the updated policy relative to the sampling policy; None if not
    computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A remark on a trajectory, such as a sign of reward hacking."""

    sign: str
    """Its name."""
    step: int | None
    """The step, from 0; None for the whole episode."""
    seen: str
    """The observation, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySample:
    """A trajectory to show."""

    label: str
    """Its origin: ``training, step 1``."""
    trajectory: Trajectory
    steps: Sequence[StepTokens] | None = None
    """Training of its steps, shape (S,); None if it was not trained on."""
    rows: Sequence[Row] = ()
    """Its training rows."""
    marks: Sequence[Mark] = ()
    """Signs of reward hacking in it."""
    diagnosis: Any = None
    """The step that lost it, if diagnosed."""


def step_tokens(
    record: BatchRecord, episode: int, new_logprobs: npt.NDArray[Any] | None = None
) -> list[StepTokens]:
    """Return the action tokens of each step of a trajectory, as they were trained.

    `new_logprobs`, (B, T), are those of the updated policy.
    """
    advantages = _array(record.tensors.get("advantages"))
    values = _array(record.tensors.get("old_values"))
    # a turn without tokens has nothing to train
    nothing = StepTokens(
        row=0, fork_reason=None, is_trained=[], advantages=[], values=None, ratios=None
    )
    steps = [nothing] * len(record.trajectories[episode].transitions)
    own = [(i, row) for i, row in enumerate(record.rows) if row.episode == episode]
    for number, (i, row) in enumerate(own):
        row_steps, is_action = np.array(row.steps), np.array(row.is_action, bool)
        for step in dict.fromkeys(row_steps[is_action].tolist()):
            at = np.flatnonzero((row_steps == step) & is_action)  # positions in the row
            ratios = None
            if new_logprobs is not None:
                ratios = np.exp(new_logprobs[i, at] - np.array(row.logprobs)[at]).tolist()
            steps[step] = StepTokens(
                row=number,
                fork_reason=row.fork_reason if step == row.steps[0] else None,
                is_trained=np.array(row.is_trained, bool)[at].tolist(),
                advantages=[0.0] * len(at) if advantages is None else advantages[i, at].tolist(),
                values=None if values is None else values[i, at].tolist(),
                ratios=ratios,
            )
    return steps


def _array(tensor: Any) -> Floats | None:
    return None if tensor is None else tensor.detach().float().cpu().numpy()


def choose(trajectories: Sequence[Trajectory], count: int) -> list[int]:
    """Return the indices of at most `count` trajectories, failures and successes alternating.

    The first of each group precedes the second of any.
    """
    seen: Counter[str] = Counter()
    by_outcome: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for i, trajectory in enumerate(trajectories):
        seen[trajectory.group_id] += 1
        by_outcome[trajectory.success].append((seen[trajectory.group_id], i))
    queues = [sorted(entries) for entries in by_outcome.values()]
    chosen: list[int] = []
    while len(chosen) < count and any(queues):
        chosen += [queue.pop(0)[1] for queue in queues if queue]
    return chosen[:count]


def siblings(trajectories: Sequence[Trajectory], order: Sequence[int]) -> list[int]:
    """Return the members of the group whose returns differ most, in the given order."""
    groups: dict[str, list[int]] = {}
    for i in order:
        groups.setdefault(trajectories[i].group_id, []).append(i)
    returns = {group: [trajectories[i].return_ for i in own] for group, own in groups.items()}
    spread = {group: max(values) - min(values) for group, values in returns.items()}
    return groups[max(spread, key=spread.__getitem__)] if groups else []


def trained_samples(
    record: BatchRecord,
    chosen: Sequence[int],
    *,
    label: str,
    new_logprobs: npt.NDArray[Any] | None = None,
    find_marks: Callable[[Trajectory], Sequence[Mark]] = lambda _: (),
) -> list[TrajectorySample]:
    """Return the trajectories `chosen` (indices) of a training batch; see `step_tokens`."""
    samples = []
    for i in chosen:
        trajectory = record.trajectories[i]
        rows = [row for row in record.rows if row.episode == i]  # none if it cannot be scored
        samples.append(
            TrajectorySample(
                label=f"{label}, {trajectory.env}" if trajectory.env else label,
                trajectory=trajectory,
                steps=step_tokens(record, i, new_logprobs) if rows else None,
                rows=rows,
                marks=find_marks(trajectory),
            )
        )
    return samples


def state_change(trajectory: Trajectory, step: int) -> tuple[list[Message], list[Message]]:
    """Return the messages that the state of `step` added to the last one and its action.

    The second list holds those that were removed or shortened.
    """
    after: list[Message] = list(trajectory.transitions[step].messages)
    if step == 0:
        return after, []
    previous = trajectory.transitions[step - 1]
    before = [*previous.messages, _action_message(previous, after)]
    # what follows the model's last message is new, even if it repeats earlier text
    roles = [message["role"] for message in after]
    num_new = roles[::-1].index("assistant") if "assistant" in roles else 0
    kept, new = after[: len(after) - num_new], after[len(after) - num_new :]
    matcher = difflib.SequenceMatcher(None, [*map(_key, before)], [*map(_key, kept)], False)
    added: list[Message] = []
    dropped: list[Message] = []
    for kind, i, j, k, m in matcher.get_opcodes():
        if kind != "equal":
            dropped += before[i:j]
            added += kept[k:m]
    return [*added, *new], dropped


def _action_message(previous: Transition, after: Sequence[Message]) -> Message:
    """Return the action as in the next state, where native calls are structured."""
    at = len(previous.messages)
    extends = len(after) > at and list(after[:at]) == previous.messages
    if extends and after[at]["role"] == "assistant":
        return after[at]
    return Message(role="assistant", content=previous.action)


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, default=str)
