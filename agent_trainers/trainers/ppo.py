"""`StepPPOTrainer`: PPO on environment steps, `StepGRPOTrainer` with a critic.

The critic is not part of the policy's module tree, so it is neither sent to vLLM nor wrapped by
PEFT. It shares the optimiser, as a separate group. The value of a completion token is that of the
state before it, read at the position that also gives the token's log-probability.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel, TrainerCallback

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import estimate, estimator_options
from agent_trainers.algorithms.episodes import Array, apart, whiten
from agent_trainers.algorithms.losses import value_loss
from agent_trainers.batching.collate import collate, pad_like
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.batching.per_token import (
    credit_masks,
    sort_by_step,
    spread_over_tokens,
    value_masks,
)
from agent_trainers.batching.probe import without_dropout
from agent_trainers.batching.rows import state_row
from agent_trainers.batching.shared_prefix import align
from agent_trainers.monitoring.episode_statistics import EpisodeSummary
from agent_trainers.monitoring.trajectory_samples import BatchRecord
from agent_trainers.policies.local import context_length
from agent_trainers.trainers.config import StepPPOConfig, has_critic
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.scorer import body_of
from agent_trainers.trajectory import Trajectory

CRITIC_FILE: Final = "critic.safetensors"
"""Weights of a critic: those of a `ValueHead`, or of a `CriticModel`."""


class StepPPOTrainer(StepGRPOTrainer):
    """Trains a language model and a critic by PPO; each environment step is one transition."""

    args: StepPPOConfig

    def __init__(
        self, model: Any, env: Any, args: StepPPOConfig | None = None, **rest: Any
    ) -> None:
        """Set up `StepGRPOTrainer`, which documents the arguments, and the critic."""
        super().__init__(model, env, args or StepPPOConfig("step-ppo"), **rest)
        if self.optimizer is not None:
            raise ConfigurationError(
                "optimizers= is not supported: it would not train the critic. Use optim= and "
                "critic_learning_rate=."
            )
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ConfigurationError(
                "FSDP and DeepSpeed are not supported with a critic, because they shard one model. "
                "Use plain data parallelism, or an algorithm without a critic."
            )
        name = self.args.critic_model
        self._is_shared = name is None
        """Whether the critic is a head on the policy's body."""
        hidden_size = self.model.config.get_text_config().hidden_size
        self.critic: nn.Module = self.accelerator.prepare_model(
            ValueHead(hidden_size) if name is None else CriticModel(name)
        )
        self._trained_beside = (self.critic,)
        self.add_callback(_ClearGradients(self.critic))

    @torch.no_grad()
    def values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token of rows, (B, T)."""
        # unwrapped: processes may have different numbers of rows
        critic = self.accelerator.unwrap_model(self.critic)

        def values_of(micro_batch: MicroBatch) -> torch.Tensor:
            rows = micro_batch.forwarded
            with self.accelerator.autocast():
                is_shared = self._is_shared
                values = state_values(self._body(), critic, rows) if is_shared else critic(rows)
            return micro_batch.expand(values)

        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        is_training = self.model.training
        with without_dropout(self.model, self.critic):
            return self.scorer.by_micro_batch(batch, values_of, is_training=is_training)

    # Credit

    def assign_credit(
        self, batch: BatchRecord, episodes: Sequence[EpisodeSummary], first: int
    ) -> tuple[Sequence[Array], Mapping[str, torch.Tensor]]:
        """Estimate from this process's values; whiten over all processes, by environment."""
        rows, tokens = batch.rows, batch.tensors["completion_ids"]
        own = episodes[first : first + len(batch.trajectories)]
        if any(e.frozen_roles or any(e.reward_owners) for e in own):
            raise ConfigurationError(
                "Frozen roles, and rewards of one role (reward_owners), are not supported with a "
                "critic. Use an algorithm without one, such as grpo_step."
            )
        num_steps = [len(episode.rewards) for episode in own]
        masks = credit_masks(rows, actions_only=self.args.advantage_mask)
        old_values = self.values(batch.tensors)
        values = sort_by_step(rows, masks, old_values.cpu().numpy(), num_steps)
        settings = {"whiten": True, **self.args.estimator_settings}
        is_whitened = settings["whiten"]  # below, over all processes
        settings |= {"bootstrap_values": self.bootstrap_values(batch.trajectories), "whiten": False}
        known = estimator_options(self.args.advantage_estimator)
        raw = estimate(
            self.args.advantage_estimator,
            own,
            values=values,
            **{name: value for name, value in settings.items() if name in known},
        )
        spread = pad_like(spread_over_tokens(rows, masks, raw, num_steps), tokens)
        has_value = value_masks(rows, masks, raw, num_steps)
        tensors = {
            "old_values": old_values,
            "value_targets": old_values + spread,  # where `value_weights` are not 0
            "value_weights": self.processes.normalise(pad_like(has_value, tokens)),
        }
        for name, value in self._explained_variance(**tensors).items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
        everyone = self.processes.all_gather_objects(raw)
        if is_whitened:
            everyone = apart(whiten, everyone, [episode.env for episode in episodes])
        return everyone, tensors

    def bootstrap_values(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Return the value of each trajectory's last state; 0 where it is not truncated.

        Of a state that fills the context the first tokens are left out.
        """
        values = [0.0] * len(trajectories)
        cut = [i for i, t in enumerate(trajectories) if t.is_scorable and t.is_truncated]
        if cut and self.args.bootstrap_truncated:
            pad = self._tokenizer.pad_token_id
            limit = context_length(self.model) - 1  # a row has a token behind the state
            states = [trajectories[i].final_prompt_ids[-limit:] for i in cut]
            last = collate([state_row(state, pad) for state in states], pad)
            for i, value in zip(cut, self.values(last)[:, 0].tolist(), strict=True):
                values[i] = value
        return values

    def _explained_variance(
        self, old_values: torch.Tensor, value_targets: torch.Tensor, value_weights: torch.Tensor
    ) -> dict[str, float]:
        """Return the explained variance of the targets and their mean; NaN without variance."""
        errors = value_targets - old_values
        sums = [
            (value_weights * x**power).sum() for x in (value_targets, errors) for power in (1, 2)
        ]
        mean, square, error, squared_error = self.processes.all_reduce(torch.stack(sums)).tolist()
        variance, unexplained = square - mean**2, squared_error - error**2
        explained = 1.0 - unexplained / variance if variance > 1e-12 else float("nan")
        return {"critic/explained_variance": explained, "critic/value_target": mean}

    # Overrides

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Add the critic's weights to the optimiser. Relies on: called before training."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            optimizer.add_param_group(
                {
                    "params": list(self.critic.parameters()),
                    "lr": self.args.critic_learning_rate or 10 * self.args.learning_rate,
                    "weight_decay": 0.0,
                }
            )
        return optimizer

    def _clip_grad_norm(self, model: Any) -> Any:
        """Clip the critic's gradient separately.

        Relies on: called before each optimiser step, and first unscales all fp16 gradients of the
        optimiser.
        """
        norm = super()._clip_grad_norm(model)
        nn.utils.clip_grad_norm_(self.critic.parameters(), self.args.max_grad_norm)
        return norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the critic next to the policy. Relies on: called wherever the policy is saved."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            critic = self.accelerator.unwrap_model(self.critic)
            save_critic(critic, Path(output_dir or self.args.output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the critic with the policy. Relies on: called when a run is resumed."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights = load_file(Path(resume_from_checkpoint) / CRITIC_FILE)
        self.accelerator.unwrap_model(self.critic).load_state_dict(weights)

    # Loss

    def _micro_batch_loss(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return policy loss and value loss of a micro-batch."""
        is_warming_up = self.state.global_step < self.args.critic_warmup_steps
        caught: list[torch.Tensor] = []  # TRL's head does not return hidden states
        with self._body().register_forward_hook(
            lambda _, __, output: caught.append(output.last_hidden_state)
        ):
            scores = self.scorer.score(model, micro_batch)
        policy_loss = self.scorer.token_loss(micro_batch, scores)
        loss = self._reduce_loss(policy_loss, micro_batch["loss_weights"])
        if is_warming_up:
            loss = 0.0 * loss
        if self._is_shared:
            states = caught[-1].detach() if is_warming_up else caught[-1]
            values = self.critic(states).gather(1, scores.before)
        else:
            values = self.critic(micro_batch.forwarded)
        weights = micro_batch["value_weights"]
        errors = value_loss(
            micro_batch.expand(values),
            micro_batch["old_values"],
            micro_batch["value_targets"],
            self.args.value_clip_range,
        )
        self.means.add_mean("critic/value_loss", errors, weights)
        return loss + self.args.value_coef * self._reduce_loss(errors, weights)

    def _body(self) -> Any:
        return body_of(self.accelerator.unwrap_model(self.model))


class _ClearGradients(TrainerCallback):  # type: ignore[misc] # transformers is untyped
    """Clears the critic's gradients; the trainer clears those of the policy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Clear them after a step, also one that the fp16 scaler skipped."""
        self._model.zero_grad()


class ValueHead(nn.Module):
    """A linear map from hidden states to values, which start at 0."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T), float32."""
        values: torch.Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values.float()


class CriticModel(nn.Module):
    """A separate transformer with a value head."""

    def __init__(self, name: str) -> None:
        """Load the body of a model on the hub, or in a folder.

        From a folder with a critic it loads that: the head with its own body, or with the model of
        the folder. Otherwise all values start at 0.
        """
        super().__init__()
        path = Path(name) / CRITIC_FILE
        try:
            weights = load_file(path) if path.exists() else {}
            has_body = any(key.startswith("body.") for key in weights)
            if has_body:
                config = AutoConfig.from_pretrained(name)
                self.body = AutoModel.from_config(config, dtype=torch.float32)
            else:
                self.body = AutoModel.from_pretrained(name, dtype=torch.float32)
            self.head = ValueHead(self.body.config.get_text_config().hidden_size)
            if weights:
                (self if has_body else self.head).load_state_dict(weights)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(f"critic_model={name}: cannot be loaded ({error}).") from error

    def forward(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token of rows, (B, T)."""
        return state_values(self.body, self.head, rows)


def save_critic(critic: nn.Module, folder: Path) -> None:
    """Write a critic's weights to a folder, atomically."""
    with atomic_path(folder / CRITIC_FILE) as path:
        save_file({name: v.contiguous() for name, v in critic.state_dict().items()}, path)


def state_values(body: Any, head: nn.Module, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the values before the completion tokens of rows, (B, T)."""
    aligned = align(rows)
    hidden = body(input_ids=aligned.input_ids, use_cache=False).last_hidden_state  # (B, N, H)
    values: torch.Tensor = head(hidden).gather(1, aligned.before)
    return values


def trainer_class(algorithm: str) -> type[StepGRPOTrainer]:
    """Return the class of a preset's trainer."""
    return StepPPOTrainer if has_critic(algorithm) else StepGRPOTrainer
