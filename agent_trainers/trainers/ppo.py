"""`StepPPOTrainer`: PPO on environment steps: `StepGRPOTrainer` with a critic.

The critic stays outside the policy's module tree, so that what is saved, sent to vLLM or wrapped by
PEFT is the policy alone. It shares the optimiser, as a group of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.losses import value_loss
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.trainers.credit import CriticCredit
from agent_trainers.trainers.critic import (
    CriticModel,
    ValueHead,
    before_tokens,
    body_states,
    watch_states,
)
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.ppo_config import StepPPOConfig
from agent_trainers.trainers.scorer import body_of

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
        self._trained_beside = (self.critic,)
        self.builder.assign_credit = CriticCredit(
            args=self.args,
            processes=self.processes,
            values_of=self.values,
            pad_token_id=self._tokenizer.pad_token_id,
        )

    @torch.no_grad()
    def values(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token of rows, (B, T)."""
        # unwrapped: processes may have different numbers of rows to ask about
        critic = self.accelerator.unwrap_model(self.critic)

        def values_of(micro_batch: MicroBatch) -> torch.Tensor:
            rows = micro_batch.forwarded
            with self.accelerator.autocast():
                if self._is_shared:
                    values = before_tokens(critic(body_states(self._body(), rows)), rows)
                else:
                    values = critic(rows)
            return micro_batch.expand(values)

        batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
        return self.scorer.by_micro_batch(batch, values_of, is_training=self.model.training)

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

    # The loss

    def _micro_batch_loss(self, model: Any, micro_batch: MicroBatch) -> torch.Tensor:
        """Return policy loss and value loss of a micro-batch."""
        is_warming_up = self.state.global_step < self.args.critic_warmup_steps
        with watch_states(self._body()) as caught:
            scores = self.scorer.score(model, micro_batch, with_aux_loss=True)
        loss = self._policy_loss(micro_batch, scores)
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

    @property
    def _is_shared(self) -> bool:
        """Whether the critic is a head on the policy's body."""
        return self.args.critic_model is None

    def _body(self) -> Any:
        return body_of(self.accelerator.unwrap_model(self.model))
