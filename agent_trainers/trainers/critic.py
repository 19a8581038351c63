"""Critics: what a state is worth, token by token.

The value that belongs to a completion token is that of the state before it: it is read where the
model stands when it is about to write the token, as the token's log-probability is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModel

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.shared_prefix import align


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

        Raises:
            ConfigurationError: If it cannot be loaded.
        """
        super().__init__()
        try:
            self.body = AutoModel.from_pretrained(name, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"critic_model={name}: could not be loaded ({error}). Pass a name on the hub or a "
                "folder that save_pretrained wrote."
            ) from error
        self.head = ValueHead(self.body.config.get_text_config().hidden_size)

    def forward(self, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the value before each completion token of rows, (B, T)."""
        return before_tokens(self.head(body_states(self.body, rows)), rows)


def body_states(body: Any, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the last hidden states of rows flush left, (B, N, H)."""
    output = body(input_ids=align(rows).input_ids, use_cache=False)
    states: torch.Tensor = output.last_hidden_state
    return states


def before_tokens(values: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Pick those before completion tokens, (B, T), of values at every position, (B, N)."""
    return values.gather(1, align(rows).before)
