"""`StepPPOTrainer`: PPO on environment steps: `StepGRPOTrainer` with a critic.

The critic stays outside the policy's module tree, so that what is saved, sent to vLLM or wrapped by
PEFT is the policy alone. It shares the optimiser, as a group of its own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from safetensors.torch import load_file, save_file
from torch import nn

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import TOKEN_LEVEL, Array, estimate, whiten
from agent_trainers.algorithms.losses import value_loss
from agent_trainers.batching.micro_batch import Piece
from agent_trainers.batching.rows import Row, collate, state_row
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.trainers.critic import (
    CriticModel,
    ValueHead,
    before_tokens,
    body_states,
    watch_states,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer, body_of
from agent_trainers.trainers.ppo_config import StepPPOConfig
from agent_trainers.trajectory import Trajectory

CRITIC_FILE: Final = "critic.safetensors"


class StepPPOTrainer(StepGRPOTrainer):
    """Trains a language model and a critic by PPO; each environment step is one transition."""

    args: StepPPOConfig

    def __init__(
        self, model: Any, env: Any, args: StepPPOConfig | None = None, **rest: Any
    ) -> None:
        """Set up `StepGRPOTrainer` and the critic.

        Args:
            model: As in `StepGRPOTrainer`.
            env: As in `StepGRPOTrainer`.
            args: Settings.
            rest: As in `StepGRPOTrainer`.

        Raises:
            ConfigurationError: If something is not supported; the message names it.
        """
        super().__init__(model, env, args or StepPPOConfig("step-ppo"), **rest)
        if self.optimizer is not None:
            raise ConfigurationError(
                "optimizers= is not supported with a critic, whose weights it would not train: "
                "choose with optim= and critic_learning_rate=."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigurationError(
                "FSDP and DeepSpeed are not supported with a critic: they shard one model. Use "
                "plain data parallelism, or an algorithm without a critic."
            )
        critic: nn.Module
        if self.args.critic_model is None:
            critic = ValueHead(self.model.config.get_text_config().hidden_size)
        else:
            critic = CriticModel(self.args.critic_model)
        self.critic: nn.Module = self.accelerator.prepare_model(critic)

    # What is overridden

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Give the critic's weights to the optimiser. Relies on: called once, before training."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        optimizer.add_param_group(
            {
                "params": list(self.critic.parameters()),
                "lr": self.args.critic_learning_rate or self.args.learning_rate,
                "weight_decay": 0.0,
            }
        )
        # The trainer clears the gradients of its model, not of all that the optimiser holds.
        optimizer.register_step_post_hook(lambda *_: self.critic.zero_grad())
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the critic's gradient by itself. Relies on: called before each optimiser step."""
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
        return super()._clip_grad_norm(model)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the critic beside the policy. Relies on: called wherever the policy is saved."""
        super()._save(output_dir, state_dict)
        critic = self.accelerator.unwrap_model(self.critic)
        with atomic_path(Path(output_dir or self.args.output_dir) / CRITIC_FILE) as path:
            save_file({name: v.contiguous() for name, v in critic.state_dict().items()}, path)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the critic with the policy. Relies on: called when a run is resumed."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = Path(resume_from_checkpoint) / CRITIC_FILE
        if not path.exists():
            raise ConfigurationError(
                f"{path} does not exist: the checkpoint is not one of a run with a critic."
            )
        self.accelerator.unwrap_model(self.critic).load_state_dict(load_file(path))

    def _piece_loss(self, model: Any, inputs: Piece) -> torch.Tensor:
        """Return policy loss and value loss of a piece."""
        is_warming_up = self.state.global_step < self.args.critic_warmup_steps
        with watch_states(self._body()) as caught:
            loss = super()._piece_loss(model, inputs)
        if is_warming_up:
            loss = 0.0 * loss
        if self._is_shared:
            states = caught[-1].detach() if is_warming_up else caught[-1]
            values = self._values_of(self.critic(states), inputs.forwarded)
        else:
            values = self.critic(inputs.forwarded)
        values = inputs.spread(values)
        errors = value_loss(
            values, inputs["old_values"], inputs["value_targets"], self.args.value_clip_range
        )
        self.shares.note_mean("critic/value_loss", errors, inputs["value_weights"])
        return loss + self.args.value_coef * self._reduce_loss(errors, inputs["value_weights"])

    # Values

    @property
    def _is_shared(self) -> bool:
        return self.args.critic_model is None

    def _body(self) -> Any:
        return body_of(self.accelerator.unwrap_model(self.model))

    def _assign_credit(
        self,
        batch: dict[str, Any],
        rows: Sequence[Row],
        trajectories: Sequence[Trajectory],
        own: Sequence[EpisodeSummary],
        mode: str,
    ) -> list[Array]:
        """Ask the critic, estimate, and add to the batch what the value loss needs."""
        own = self._with_kl_in_reward(batch, rows, own)
        old_values = self._values(batch)
        values = self._values_by_step(rows, old_values, own)
        raw = estimate(
            self.args.advantage_estimator,
            own,
            values=values,
            bootstrap_values=self._bootstrap_values(trajectories),
            whiten=False,
            **self.args.estimator_settings,
        )
        targets = [
            advantages + _aligned(steps, len(advantages))
            for advantages, steps in zip(raw, values, strict=True)
        ]
        batch["old_values"] = old_values
        batch["value_targets"] = self._per_token(rows, targets, batch)
        batch["value_weights"] = self._weights([self._has_value(row) for row in rows], batch)
        self._log_explained_variance(batch, mode)
        start = self.ranks.num_before(len(raw))
        return whiten(gather_object(raw))[start : start + len(raw)]

    def _values_of(self, values: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Pick values before completion tokens, (B, T), from those of all that went through."""
        if self.aux_loss_enabled:  # TRL's own layout: prompts flush right
            return values[:, -rows["completion_ids"].size(1) - 1 : -1]
        if self._prompt_groups(self.model, rows) is None:
            return before_tokens(values, rows)
        return values[:, :-1]  # of the last token of the prompt, and the completion's

    def _trained_models(self, model: Any) -> tuple[Any, ...]:
        return (model, self.critic)

    @torch.no_grad()
    def _values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token, (B, T)."""
        # unwrapped: processes may have different numbers of rows to ask about
        critic = self.accelerator.unwrap_model(self.critic)

        def values_of(piece: Piece) -> torch.Tensor:
            with self.accelerator.autocast():
                if self._is_shared:
                    states = body_states(self._body(), piece.forwarded)
                    return piece.spread(before_tokens(critic(states), piece.forwarded))
                return piece.spread(critic(piece.forwarded))

        return self._by_piece(batch, values_of)

    def _values_by_step(
        self, rows: Sequence[Row], values: torch.Tensor, own: Sequence[EpisodeSummary]
    ) -> list[list[Array]]:
        """Sort values of rows, (B, T), by trajectory and step, as estimators take them."""
        sorted_values: list[list[Array]] = [
            [np.zeros(0, np.float32)] * len(episode.rewards) for episode in own
        ]
        for row, numbers in zip(rows, values.cpu().numpy(), strict=False):  # padding comes last
            steps = np.where(self._has_credit(row), row.steps, -1)
            for step in dict.fromkeys(row.steps):
                sorted_values[row.episode][step] = numbers[: len(steps)][steps == step]
        return sorted_values

    def _bootstrap_values(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the value of each trajectory's last state; 0 where it was not truncated."""
        values = [0.0] * len(trajectories)
        cut = [i for i, t in enumerate(trajectories) if t.is_scorable and t.is_truncated]
        if cut and self.args.bootstrap_truncated:
            pad = self._tokenizer.pad_token_id
            rows = [state_row(trajectories[i].final_prompt_ids, pad) for i in cut]
            batch = {k: v.to(self.accelerator.device) for k, v in collate(rows, pad).items()}
            for i, value in zip(cut, self._values(batch)[:, 0].tolist(), strict=True):
                values[i] = value
        return values

    def _has_value(self, row: Row) -> npt.NDArray[np.float64]:
        """Return 1 where the critic learns: where the estimator looks at its value, shape (T,)."""
        has_credit = self._has_credit(row)
        if self.args.advantage_estimator not in TOKEN_LEVEL:
            firsts = np.diff(np.where(has_credit, row.steps, -1), prepend=-1) != 0
            has_credit = has_credit & firsts
        return has_credit.astype(float)

    def _log_explained_variance(self, batch: Mapping[str, torch.Tensor], mode: str) -> None:
        """Log how much of the targets' variance the values explain: 1 all of it, 0 none."""
        weights, targets = batch["value_weights"], batch["value_targets"]
        errors = targets - batch["old_values"]
        sums = [(weights * x**power).sum() for x in (targets, errors) for power in (1, 2)]
        mean, square, error, squared_error = self.accelerator.reduce(
            torch.stack(sums), reduction="sum"
        ).tolist()
        variance, unexplained = square - mean**2, squared_error - error**2
        explained = 1.0 - unexplained / variance if variance > 1e-12 else float("nan")
        self._metrics[mode]["critic/explained_variance"].append(explained)
        self._metrics[mode]["critic/value_target"].append(mean)


def _aligned(steps: Sequence[Array], length: int) -> Array:
    """Return the values that belong to `length` advantages: one per token, or one per step."""
    tokens = np.concatenate(steps) if length else np.zeros(0, np.float32)
    if len(tokens) == length:
        return tokens
    return np.array([step[0] for step in steps], np.float32)
