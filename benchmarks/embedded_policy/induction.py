"""Initial weights with induction heads, so that a small transformer can copy from the start.

Copying attends to an earlier occurrence of the last words and predicts what followed. It takes two
matching attention layers (Olsson et al., arXiv:2209.11895), which small batches find late or never.
So the initial weights contain them, like weights that mimic trained ones (Trockman & Kolter,
arXiv:2305.09828). All weights are trained afterwards.
"""

from typing import Any, Final

import torch

GAIN: Final = 2.0
"""Gain of the norms of queries and keys: initial sharpness of attention."""
NUM_FAST: Final = 5
"""Rotary pairs of a head that rotate too fast to compare content."""
QUIET: Final = 0.1
"""Factor of all other weights that write to the residual stream."""


@torch.no_grad()
def initialise_induction_heads(model: Any, generator: torch.Generator) -> None:
    """Overwrite weights of the first two layers of a Qwen3-type `model`.

    The first half of the residual stream holds a constant and the token. Two heads of the first
    layer write the previous token and the one before it into the third and fourth quarter. Two
    heads of the second layer attend to positions preceded by the current token, and copy their
    token.
    """
    config = model.config
    width, head = config.hidden_size, config.head_dim
    half, quarter = width // 2, width // 4
    embedding = model.model.embed_tokens.weight
    embedding[:, half:] = 0.0
    embedding[:, :half] *= 2**0.5
    embedding[:, 0] = 3 * config.initializer_range  # the same for each token
    model.model.norm.weight.fill_(GAIN)
    for layer in model.model.layers:
        layer.self_attn.q_norm.weight.fill_(GAIN)
        layer.self_attn.k_norm.weight.fill_(GAIN)
        layer.self_attn.o_proj.weight *= QUIET
        layer.mlp.down_proj.weight *= QUIET
    before, match = (layer.self_attn for layer in model.model.layers[:2])
    turn = config.rope_parameters["rope_theta"] ** (-torch.arange(head // 2) * 2 / head)
    for number, offset in enumerate((1, 2)):
        rows = slice(number * head, (number + 1) * head)
        written = slice(half + number * quarter, half + (number + 1) * quarter)
        read = torch.zeros(quarter, width)
        read[:, 1:half] = torch.linalg.qr(torch.randn(half - 1, quarter, generator=generator))[0].T
        _attend_back(before.q_proj.weight[rows], before.k_proj.weight[rows], turn[:2] * offset)
        before.v_proj.weight[rows] = 0.0
        before.v_proj.weight[rows][:quarter] = read
        before.o_proj.weight[:, rows] = 0.0
        before.o_proj.weight[written, rows][:, :quarter] = QUIET * 2 * torch.eye(quarter)
        # the slowly rotating dimensions, of both halves of the rotary pairs
        slow = [i for i in range(head) if i % (head // 2) >= NUM_FAST][:quarter]
        match.q_proj.weight[rows] = 0.0
        match.k_proj.weight[rows] = 0.0
        for place, row in zip(slow, range(quarter), strict=True):
            match.q_proj.weight[rows.start + place] = read[row]
            match.k_proj.weight[rows.start + place, written.start + row] = 1.0
        token = torch.eye(width)[1 : head + 1]
        token[:, half:] = 0.0
        match.v_proj.weight[rows] = token
        match.o_proj.weight[:, rows] = token.T * 0.5


def _attend_back(query: torch.Tensor, key: torch.Tensor, angles: torch.Tensor) -> None:
    """Make a head attend to the relative position given by rotary `angles`."""
    half = len(query) // 2
    query.zero_()
    key.zero_()
    query[: len(angles), 0] = torch.cos(angles)
    query[half : half + len(angles), 0] = -torch.sin(angles)
    key[: len(angles), 0] = 1.0
