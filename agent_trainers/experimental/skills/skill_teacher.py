"""The teacher of self-distillation: the policy itself, in the same states, with a skill in them.

Its weights are the policy's own at the time, or those of the reference.

Rows, tokens and masks stay those of the policy; only the prompt of a row is another, so the teacher
is a second pass over the same completions, without a gradient and without dropout.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agent_trainers.batching.collate import pad_rows
from agent_trainers.batching.rows import Row
from agent_trainers.experimental.skills.skills import (
    GROUP,
    NOTE,
    best_other,
    skill_finder,
    tell_success,
)
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trainers.scorer import Scorer
from agent_trainers.trajectory import Trajectory


class SkillTeacher:
    """Says how likely the sampled tokens are to a policy that knows a skill."""

    def __init__(
        self,
        *,
        source: str,
        is_reference: bool,
        scorer: Scorer,
        renderer: ChatRenderer,
        max_tokens: int,
    ) -> None:
        """Teach skills from a file, or of each group's successes.

        Args:
            source: `GROUP`, or the path of a file of skills.
            is_reference: Whether its weights are the reference's, not the policy's own.
            scorer: Computes log-probabilities.
            renderer: Of the tokenizer and template that the policy acts with.
            max_tokens: What the model attends to: longer rows are not taught.

        Raises:
            ConfigurationError: If the template does not tell where a message ends.
            DataError: If the file is none of skills.
        """
        self._scorer, self._renderer, self._max_tokens = scorer, renderer, max_tokens
        self._is_reference = is_reference
        self._skill_of_task = None if source == GROUP else skill_finder(source)
        renderer.end_of_state([])  # refuses what it cannot read before anything is played

    def teach(
        self,
        policy: Any,
        trajectories: Sequence[Trajectory],
        rows: Sequence[Row],
        tensors: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return what the teacher says of a batch; collective.

        Args:
            policy: The model that learns.
            trajectories: This process's episodes.
            rows: Their rows.
            tensors: The batch: these rows, then padding rows.

        Returns:
            ``teacher_per_token_logps``, and ``skill_mask``, 1 where a sampled token is trained and
            has a teacher; each (B, T).
        """
        skills = self._skills(trajectories)
        prompts = {
            i: prompt_ids
            for i, row in enumerate(rows)
            if (prompt_ids := self._prompt_ids(row, trajectories[row.episode], skills[row.episode]))
        }
        taught = {
            "teacher_per_token_logps": torch.zeros_like(tensors["sampling_per_token_logps"]),
            "skill_mask": torch.zeros_like(tensors["action_mask"]),
        }
        if not prompts and not self._scorer.is_sharded:
            return taught
        chosen = list(prompts) or [0]  # a row that only keeps other processes company
        batch = {name: tensor[chosen] for name, tensor in tensors.items()}
        if prompts:
            batch |= _padded(list(prompts.values()), tensors["prompt_ids"])
        logprobs = self._scorer.look(policy, batch, at_reference=self._is_reference)
        taught["teacher_per_token_logps"][chosen] = logprobs
        taught["skill_mask"][list(prompts)] = tensors["action_mask"][list(prompts)]
        return taught

    def _skills(self, trajectories: Sequence[Trajectory]) -> list[str | None]:
        """Return the skill of each episode, where there is one; collective."""
        if self._skill_of_task is not None:
            return [self._skill_of_task(trajectory.task_id) for trajectory in trajectories]
        processes = self._scorer.processes
        first = processes.num_before(len(trajectories))
        told = [tell_success(trajectory, first + i) for i, trajectory in enumerate(trajectories)]
        everyone = processes.all_gather_objects([success for success in told if success])
        return [best_other(everyone, t.group_id, first + i) for i, t in enumerate(trajectories)]

    def _prompt_ids(self, row: Row, trajectory: Trajectory, skill: str | None) -> list[int] | None:
        """Return a row's prompt with a skill in it; None where none belongs, or it does not fit.

        The skill stands at the end of the first state's last message: before all that the policy
        did, so it is the same however steps are merged into rows.
        """
        first = trajectory.transitions[0].prompt_ids
        place = self._renderer.end_of_state(first)
        if skill is None or place is None or row.prompt_ids[: place + 1] != first[: place + 1]:
            return None
        note = self._renderer.note_ids(NOTE.format(skill=skill))
        if len(row.prompt_ids) + len(note) + len(row.completion_ids) > self._max_tokens:
            return None
        return [*row.prompt_ids[:place], *note, *row.prompt_ids[place:]]


def _padded(prompts: Sequence[Sequence[int]], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return prompts as `collate` makes them, on the device of `like`, (B, P)."""
    masks = [[1] * len(prompt_ids) for prompt_ids in prompts]
    padded = {"prompt_ids": prompts, "prompt_mask": masks}
    return {
        name: pad_rows(values, multiple=1, side="left").to(like.device)
        for name, values in padded.items()
    }
