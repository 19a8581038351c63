"""Rows: training sequences made of transitions, with steps that extend each other merged.

A row is a prompt and a completion. If the state of a step begins with a whole row so far (state and
action of an earlier step, token by token), the step joins that row, and the observation in between
becomes part of the completion; among several rows, it joins the longest. Merging does not change
the gradient, because attention is causal and the loss weighs tokens, steps or trajectories, not
rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from agent_trainers.trajectory import StopReason, Trajectory, Transition

CHANGED: Final = "the environment or the chat template rewrote the past"


@dataclass(slots=True)
class Row:
    """One training sequence. The lists after `prompt_ids` have shape (T,)."""

    episode: int
    """Number of its trajectory in the batch of this process; -1 for padding."""
    prompt_ids: list[int]
    """The state of the row's first step; at least one token."""
    completion_ids: list[int] = field(default_factory=list)
    """Actions, and the observations between them."""
    steps: list[int] = field(default_factory=list)
    """The step of each token; an observation has that of the action before it."""
    is_action: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token."""
    is_trained: list[bool] = field(default_factory=list)
    """Whether the policy learns from it."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability when sampled; 0 where not sampled."""
    fork_reason: str | None = None
    """Why the row begins in the middle of its trajectory; None at its beginning."""

    @property
    def num_tokens(self) -> int:
        """Length of the sequence so far."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def is_extended_by(self, transition: Transition) -> bool:
        """Return whether the state of `transition` begins with the whole of this row."""
        n, state = self.num_tokens, transition.prompt_ids
        last = (self.completion_ids or self.prompt_ids)[-1:]
        # the last token first: a trajectory of many rows compares each state with all of them
        return state[n - 1 : n] == last and state[:n] == self.prompt_ids + self.completion_ids

    def labels(self) -> list[int]:
        """Return the labels of prompt and completion; -100 where not trained."""
        trained = zip(self.completion_ids, self.is_trained, strict=True)
        return [-100] * len(self.prompt_ids) + [
            t if is_trained else -100 for t, is_trained in trained
        ]

    def append(
        self, transition: Transition, step: int, *, is_trained: bool, train_between: bool
    ) -> None:
        """Append a step whose state begins with the whole of this row."""
        action = transition.completion_ids
        between = transition.prompt_ids[self.num_tokens :]
        self.completion_ids += [*between, *action]
        self.steps += self.steps[-1:] * len(between) + [step] * len(action)
        self.is_action += [False] * len(between) + [True] * len(action)
        self.is_trained += [train_between] * len(between) + [is_trained] * len(action)
        self.logprobs += [0.0] * len(between) + transition.logprobs.tolist()


def make_rows(
    trajectory: Trajectory,
    episode: int = 0,
    *,
    merge: bool = True,
    train_truncated: bool = True,
    train_observations: bool = False,
    train_summaries: bool = True,
) -> list[Row]:
    """Turn one trajectory into rows, without steps of frozen roles and shared steps of branches.

    Args:
        trajectory: A scorable trajectory.
        episode: Its number in the batch.
        merge: Join steps that extend each other; False gives a row per step.
        train_truncated: Whether turns that were cut off by the token limit are trained.
        train_observations: Whether observations inside a row are trained as well.
        train_summaries: Whether the turns in which the model summarised are trained.
    """
    rows: list[Row] = []
    for step, transition in enumerate(trajectory.transitions):
        if transition.is_frozen or step < trajectory.start:
            continue
        extended = [row for row in rows if merge and row.is_extended_by(transition)]
        row = max(extended, key=lambda each: each.num_tokens, default=None)
        if row is None:
            rows.append(row := Row(episode, list(transition.prompt_ids)))
            if step > trajectory.start:
                context = trajectory.transitions[step - 1].info.get("context", {})
                row.fork_reason = context.get("reason") or CHANGED
        # In a rollout only the last turn can be cut off; a program may continue after one.
        is_cut = transition.info.get("finish_reason") == "length" or (
            transition is trajectory.transitions[-1]
            and trajectory.stop_reason is StopReason.TOKEN_LIMIT
        )
        is_summary = (transition.info.get("action") or {}).get("kind") == "summary"
        row.append(
            transition,
            step,
            is_trained=(train_truncated or not is_cut) and (train_summaries or not is_summary),
            train_between=train_observations,
        )
    return [row for row in rows if row.completion_ids]


def state_row(prompt_ids: Sequence[int], pad_token_id: int) -> Row:
    """Return an untrained row with one token, at which the value of a state is read."""
    return Row(-1, list(prompt_ids), [pad_token_id], [0], [False], [False], [0.0])


def padding_row(pad_token_id: int) -> Row:
    """Return a row without training and weight."""
    return state_row([pad_token_id], pad_token_id)
