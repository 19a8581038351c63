"""Trajectories that nobody played: a context that grows by a turn and an observation a step."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from agent_trainers.rollout.collector import EpisodeSpec
from agent_trainers.trajectory import StopReason, Trajectory, Transition

PROMPT_TOKENS: Final = 250
"""What HotpotQA's first state has with the template of Qwen2.5 and one tool."""
ACTION_TOKENS: Final = 24
"""A search call."""
OBSERVATION_TOKENS: Final = 60
"""A short result. Where results are long beside the prompt, merging saves less: see `token_ratio`
in the results, which is what it could save if work were proportional to tokens."""
FIRST_TOKEN: Final = 8
"""Below it are the tokenizer's special ones."""
NUM_TOKENS: Final = 200


def make_trajectory(num_steps: int, rng: np.random.Generator) -> Trajectory:
    """Make a trajectory, each state of which extends the last.

    Its parts are 0.5 to 1.5 times as long as the constants above.
    """

    def draw(mean: int) -> list[int]:
        return _draw_tokens(int(rng.integers(mean // 2, mean + mean // 2 + 1)), rng)

    state, transitions = draw(PROMPT_TOKENS), []
    for step in range(num_steps):
        action = draw(ACTION_TOKENS)
        transitions.append(_make_step(state, action, rng, is_last=step == num_steps - 1))
        state = [*state, *action, *draw(OBSERVATION_TOKENS)]
    return _trajectory(transitions)


def make_long_turn(prompt_tokens: int, action_tokens: int, rng: np.random.Generator) -> Trajectory:
    """Make a trajectory of one step with these very lengths."""
    state, action = (_draw_tokens(length, rng) for length in (prompt_tokens, action_tokens))
    return _trajectory([_make_step(state, action, rng, is_last=True)])


def row_lengths(trajectory: Trajectory) -> list[int]:
    """Return the tokens of each step's row; the last is as long as the merged one."""
    return [len(t.prompt_ids) + len(t.completion_ids) for t in trajectory.transitions]


def _draw_tokens(length: int, rng: np.random.Generator) -> list[int]:
    tokens: list[int] = rng.integers(FIRST_TOKEN, NUM_TOKENS, size=length).tolist()
    return tokens


def _make_step(
    state: list[int], action: list[int], rng: np.random.Generator, *, is_last: bool
) -> Transition:
    return Transition(
        messages=[{"role": "user", "content": ""}], prompt_ids=state, completion_ids=action,
        logprobs=np.zeros(len(action), np.float32), action="", reward=float(rng.random()),
        reward_terms={}, terminated=is_last, truncated=False, info={},
    )  # fmt: skip


def _trajectory(transitions: list[Transition]) -> Trajectory:
    return Trajectory(
        task_id="0", group_id="0", transitions=transitions, metrics={"success": 0.0},
        timings={"generate_seconds": 0.0, "environment_seconds": 0.0},
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


class RecordedRollout:
    """Stands in a trainer's rollout: hands out batches that were made before."""

    def __init__(self, batches: Sequence[Sequence[Trajectory]]) -> None:
        """Hand out `batches` in order, then the last again and again."""
        self._batches, self._next = batches, 0

    def collect(self, specs: Sequence[EpisodeSpec], *_: Any, **__: Any) -> list[Trajectory]:
        """Return the next batch; it has a trajectory per spec."""
        batch = self._batches[min(self._next, len(self._batches) - 1)]
        self._next += 1
        return list(batch)

    def close(self) -> None:
        """Close nothing."""
