"""Extensions: code that takes part in a training run without the trainer knowing it.

``--extensions my_module:MyExtension`` (or JSON with arguments) attaches one; in Python also
``extension.attach(trainer)``. Every method has a default that changes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from agent_envs.core.command_line import json_object
from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import find_estimator
from agent_trainers.batching.micro_batch import MicroBatch
from agent_trainers.batching.rows import Row
from agent_trainers.monitoring.trajectory_samples import BatchRecord, Mark
from agent_trainers.rollout.episode import EpisodeSpec
from agent_trainers.trajectory import Trajectory


class Extension:
    """Base class of extensions; override what you need."""

    trainer: Any = None

    def attach(self, trainer: Any) -> None:
        """Take part in the run of `trainer`, or refuse its settings; may add callbacks to it."""
        self.trainer = trainer
        trainer.extensions.append(self)
        trainer.keeping_state[type(self).__name__] = self

    def collect(
        self,
        specs: Sequence[EpisodeSpec],
        step: tuple[int, int],
        reward_factors: Mapping[str, float],
    ) -> list[Trajectory] | None:
        """Collect the episodes of a training batch instead of the trainer; collective.

        Args:
            specs: This process's episodes.
            step: Optimiser step, and micro-batch in it.
            reward_factors: Current factor of each scheduled reward term.
        """
        return None

    def is_trained(self, trajectory: Trajectory) -> bool:
        """Return whether a scorable trajectory gets training rows."""
        return True

    def batch_tensors(
        self,
        policy: Any,
        trajectories: Sequence[Trajectory],
        rows: Sequence[Row],
        tensors: Mapping[str, torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        """Return further tensors of a training batch, each (B, ...); collective."""
        return {}

    def token_loss(
        self,
        loss: torch.Tensor,
        micro_batch: MicroBatch,
        logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
    ) -> torch.Tensor:
        """Return the loss of each token given the policy loss, (B, T)."""
        return loss

    def metrics(self, mode: str, step: int, batch: BatchRecord) -> Mapping[str, float]:
        """Return metrics to log of the batch of an optimiser step; collective."""
        return {}

    def marks(self, trajectory: Trajectory) -> Sequence[Mark]:
        """Return remarks on a trajectory for the run's pages."""
        return ()

    def active_alarms(self) -> Mapping[str, str]:
        """Return current alarms by the sign of their marks, shown during the run."""
        return {}

    def results(self) -> Mapping[str, Any]:
        """Return entries of ``results.json``."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that checkpoints hold, in plain types, the same in every process."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def make_extensions(value: str | None, advantage_estimator: str) -> list[Extension]:
    """Return the extensions of a setting, and the one that the estimator needs, if any.

    The setting is an import path, or JSON: ``{"my_module:MyExtension": {"argument": 1}}``; the
    estimator's attribute ``extension`` is an import path.

    Raises:
        ConfigurationError: If the value is malformed, or an extension rejects its arguments.
    """
    value = (value or "{}").strip()
    entries = json_object(value, "extensions") if value.startswith("{") else {value: {}}
    needed = getattr(find_estimator(advantage_estimator), "extension", None)
    extensions = []
    for path in dict.fromkeys([*entries, *([needed] if needed else [])]):
        make: Any = lookup_or_import({}, path, kind="extension")
        try:
            extensions.append(make(**(entries.get(path) or {})))
        except TypeError as error:
            raise ConfigurationError(f"extensions: {path}: {error}") from None
    return extensions
