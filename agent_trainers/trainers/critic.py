"""Critics: what a state is worth, token by token.

The value that belongs to a completion token is that of the state before it: it is read where the
model stands when it is about to write the token, as the token's log-probability is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel

from agent_envs.data.files import atomic_path
from agent_envs.errors import ConfigurationError
from agent_trainers.batching.shared_prefix import align

CRITIC_FILE: Final = "critic.safetensors"
"""Weights of a critic: those of a `ValueHead`, or of a `CriticModel`."""


class ValueHead(nn.Module):
    """A linear map from hidden states to values; all values are 0 at first."""

    def __init__(self, hidden_size: int) -> None:
        """Take hidden states of this size."""
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T), float32."""
        values: torch.Tensor = self.linear(hidden.to(self.linear.weight.dtype)).squeeze(-1)
        return values.float()


class CriticModel(nn.Module):
    """A transformer of its own with a value head."""

    def __init__(self, name: str) -> None:
        """Load the body of a model on the hub, or in a folder.

        A folder with a critic (of a trained value, or of a run with a critic) provides body and
        head. Otherwise all values are 0 at first.

        Raises:
            ConfigurationError: If it cannot be loaded.
        """
        super().__init__()
        path = Path(name) / CRITIC_FILE
        try:
            weights = load_file(path) if path.exists() else {}
            has_body = any(key.startswith("body.") for key in weights)
            self.body = (
                AutoModel.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
                if has_body
                else AutoModel.from_pretrained(name, dtype=torch.float32)
            )
            self.head = ValueHead(self.body.config.get_text_config().hidden_size)
            if weights:
                (self if has_body else self.head).load_state_dict(weights)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigurationError(
                f"critic_model={name}: could not be loaded ({error}). Pass a name on the hub, a "
                "folder that save_pretrained wrote, or that of a trained value."
            ) from error

    def forward(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token of rows, (B, T)."""
        return before_tokens(self.head(body_states(self.body, rows)), rows)


def save_critic(critic: nn.Module, folder: Path) -> None:
    """Write a critic's weights to a folder; the file appears whole."""
    with atomic_path(folder / CRITIC_FILE) as path:
        save_file({name: v.contiguous() for name, v in critic.state_dict().items()}, path)


def body_states(body: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states of rows flush left, (B, N, H)."""
    output = body(input_ids=align(rows).input_ids, use_cache=False)
    states: torch.Tensor = output.last_hidden_state
    return states


def before_tokens(values: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pick those before completion tokens, (B, T), of values at every position, (B, N)."""
    return values.gather(1, align(rows).before)
