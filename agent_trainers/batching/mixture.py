"""Mixtures of experts: how evenly the tokens that train are spread over the experts.

The auxiliary loss of Fedus et al., 2021 (Switch Transformer, arXiv 2101.03961, eq. 4-6),
``E sum_e f_e P_e``, is a product of two means over a whole batch, so it cannot be taken batch by
micro-batch. But ``f``, the share of choices that fall on an expert, has no gradient: taken of the
whole batch beforehand it leaves a mean over tokens, which may be cut anywhere. The tokens are those
that train, where the model stands when it is about to write them: each counts once, however rows
are merged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

Logits = tuple[torch.Tensor, ...]


class Routing(NamedTuple):
    """Routing of tokens, averaged over layers; E experts."""

    probabilities: torch.Tensor
    """(B, T, E), with a gradient."""
    choices: torch.Tensor
    """How often an expert was chosen, (B, T, E); sums to the number of experts per token."""

    def imbalance(self, load: torch.Tensor) -> torch.Tensor:
        """Return the auxiliary loss of each token, (B, T), given ``f``, (..., E)."""
        return load.size(-1) * (self.probabilities * load).sum(dim=-1)


def without_router_loss(model: Any) -> dict[str, bool]:
    """Return the model arguments that switch off a mixture's own auxiliary loss.

    It would be the loss of one forward pass, with a mask that does not fit a cache.
    """
    config = getattr(model, "module", model).config.get_text_config()
    return {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}


@contextmanager
def record_router_logits(body: Any) -> Iterator[list[Logits]]:
    """Record the router logits of each forward pass: one (B * N, E) per layer.

    Args:
        body: A mixture without its language-model head, unwrapped.
    """
    recorded: list[Logits] = []
    asks = body.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "output_router_logits": True}), with_kwargs=True
    )
    keeps = body.register_forward_hook(lambda _, __, output: recorded.append(output.router_logits))
    try:
        yield recorded
    finally:
        asks.remove()
        keeps.remove()


def routing_at(logits: Sequence[torch.Tensor], places: torch.Tensor, top_k: int) -> Routing:
    """Return the routing at `places`, averaged over layers.

    Args:
        logits: (B * N, E) of each layer that has a router.
        places: Positions, (B, T), int64.
        top_k: Experts per token.
    """
    probabilities, choices = [], []
    for layer in logits:
        at = layer.view(len(places), -1, layer.size(-1)).gather(
            1, places[..., None].expand(*places.shape, layer.size(-1))
        )
        weights = at.float().softmax(dim=-1)
        chosen = weights.detach().topk(top_k, dim=-1).indices
        probabilities.append(weights)
        choices.append(torch.zeros_like(weights).scatter_(-1, chosen, 1.0))
    return Routing(torch.stack(probabilities).mean(dim=0), torch.stack(choices).mean(dim=0))
