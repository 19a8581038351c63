"""`SkillDistillation`: self-distillation from a teacher that reads a skill.

``--extensions '{"agent_trainers.experimental.skills:SkillDistillation": {"weight": 0.5}}'`` adds it
to a run. A skill is the text of another successful episode of the group. The teacher has the
weights of the policy at the start of a batch. Rows, tokens and masks are those of the policy; only
the prompt differs, so the teacher is a second pass over the same completions, without gradient and
dropout.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from agent_envs.errors import ConfigurationError
from agent_envs.formats.actions import without_thoughts
from agent_trainers.batching.collate import pad_rows
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.batching.rows import Row
from agent_trainers.policies.local import context_length
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trainers.extensions import Extension
from agent_trainers.trajectory import Trajectory

MAX_DISTILLATION_RATIO: Final = 2.0
"""Bound of the importance ratio that weighs the teacher, as in TRL's SDPO."""
NOTE: Final = "\n\nWhat worked before:\n{skill}"
"""Text with which a teacher reads a skill, after the last message of the first state."""


class Success(NamedTuple):
    """A successful episode; the best of a group sorts first."""

    group_id: str
    cost: float
    """Negative return."""
    num_steps: int
    number: int
    """Index in the batch."""
    skill: str
    """Its actions."""


class SkillDistillation(Extension):
    """Mixes the policy loss with the divergence from a policy that knows a skill."""

    def __init__(self, weight: float) -> None:
        """Set the share of the distillation loss, in (0, 1]."""
        if not 0 < weight <= 1:
            raise ConfigurationError(f"weight must be in (0, 1], not {weight}.")
        self._weight = weight

    def attach(self, trainer: Any) -> None:
        """Take part in the run of `trainer`, whose chat template must mark ends of messages."""
        super().attach(trainer)
        self._scorer = trainer.scorer
        self._max_tokens = context_length(trainer.generator.model)
        template = trainer.args.chat_template_kwargs or {}
        self._renderer = ChatRenderer(trainer.generator.tokenizer, template)
        self._renderer.end_of_state([])  # raises for unsupported templates

    def token_loss(
        self,
        loss: torch.Tensor,
        micro_batch: MicroBatch,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted mean of both losses, (B, T)."""
        teacher = micro_batch.get("teacher_per_token_logps")
        if teacher is None:  # evaluation
            return loss
        is_taught, means = micro_batch["skill_mask"], self.trainer.means
        distilled = distillation_loss(logprobs, old_logprobs, teacher) * is_taught
        means.add_mean("skill/kl", logprobs - teacher, is_taught)
        means.add_mean("skill/share", is_taught, micro_batch["action_mask"])
        return (1 - self._weight) * loss + self._weight * distilled

    def batch_tensors(
        self,
        policy: Any,
        trajectories: Sequence[Trajectory],
        rows: Sequence[Row],
        tensors: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return ``teacher_per_token_logps`` and ``skill_mask``, each (B, T); collective.

        The mask is 1 where a sampled token is trained and has a teacher.
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
        chosen = list(prompts) or [0]  # sharded models need all processes
        batch = {name: tensor[chosen] for name, tensor in tensors.items()}
        if prompts:
            masks = [[1] * len(prompt_ids) for prompt_ids in prompts.values()]
            for name, values in (("prompt_ids", list(prompts.values())), ("prompt_mask", masks)):
                padded = pad_rows(values, side="left")
                batch[name] = padded.to(tensors[name].device)
        logprobs = self._scorer.evaluate_logprobs(policy, batch)
        taught["teacher_per_token_logps"][chosen] = logprobs
        taught["skill_mask"][list(prompts)] = tensors["action_mask"][list(prompts)]
        return taught

    def _skills(self, trajectories: Sequence[Trajectory]) -> list[str | None]:
        """Return the skill of each episode, if any; collective."""
        processes = self._scorer.processes
        first = processes.num_before(len(trajectories))
        found = [find_success(trajectory, first + i) for i, trajectory in enumerate(trajectories)]
        everyone = processes.all_gather_objects([success for success in found if success])
        return [best_other(everyone, t.group_id, first + i) for i, t in enumerate(trajectories)]

    def _prompt_ids(self, row: Row, trajectory: Trajectory, skill: str | None) -> list[int] | None:
        """Return a row's prompt with the skill in the first state; None if it is not taught."""
        first = trajectory.transitions[0].prompt_ids
        place = self._renderer.end_of_state(first)
        if skill is None or place is None or row.prompt_ids[: place + 1] != first[: place + 1]:
            return None
        note = self._renderer.note_ids(NOTE.format(skill=skill))
        if len(row.prompt_ids) + len(note) + len(row.completion_ids) > self._max_tokens:
            return None
        return [*row.prompt_ids[:place], *note, *row.prompt_ids[place:]]


def find_success(trajectory: Trajectory, number: int) -> Success | None:
    """Return the success of the `number`-th episode, with its actions as the skill."""
    if not (trajectory.is_scorable and trajectory.success):
        return None
    skill = "\n".join(without_thoughts(t.action).strip() for t in trajectory.transitions)
    num_steps = len(trajectory.transitions)
    return Success(trajectory.group_id, -trajectory.return_, num_steps, number, skill)


def best_other(successes: Sequence[Success], group_id: str, number: int) -> str | None:
    """Return the skill of the group's best success other than episode `number`.

    An episode that read itself would be drawn to its own actions
    (``dont_reprompt_on_self_success`` of TRL's SDPO).
    """
    others = [s for s in successes if s.group_id == group_id and s.number != number]
    return min(others).skill if others else None


def distillation_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, teacher: torch.Tensor
) -> torch.Tensor:
    """Return the reverse KL divergence from a teacher on sampled tokens, as a loss, (B, T).

    ``sg[min(r, 2) (log pi - log pi_T)] log pi``, with ``r = pi / pi_old`` and no gradient through
    ``sg``: over tokens sampled by ``pi_old``, the expected gradient is that of ``KL(pi || pi_T)``
    in each state, apart from the bound. It is SDPO (arXiv 2601.20802) on sampled tokens, as
    TRL's ``SDPOTrainer`` has it, and the importance-weighted reverse KL of Skill-SD (2604.10674).

    The arguments are log-probabilities of the trained policy, the sampling policy and the teacher.
    """
    ratio = (logprobs - old_logprobs).exp().clamp(max=MAX_DISTILLATION_RATIO)
    return (ratio * (logprobs - teacher)).detach() * logprobs
