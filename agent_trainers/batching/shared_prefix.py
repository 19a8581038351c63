"""Forward passes over rows, by TRL's fused head: each by itself, or with prompts in common.

Rows are flush left, with padding on the right only, so a causal model needs no mask.

The members of a group begin with the same state. Its keys and values are computed once for all
rows, and their gradients add up. The result is the same as row by row.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from transformers import DynamicCache

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.micro_batch import RowGroups, group_rows, pick_rows
from agent_trainers.batching.probe import (
    Probe,
    cache_argument,
    in_float32,
    without_dropout,
    without_router_loss,
)

MIN_SAVED_SHARE: Final = 0.1
"""Below this share of all tokens the second pass costs more than it saves (measured: at 0.2 the
work is 0.84 of what it was, at 0.57 it is 0.44)."""


class Aligned(NamedTuple):
    """Rows flush left; N is the longest prompt with its completion."""

    input_ids: torch.Tensor
    """(B, N), int64."""
    labels: torch.Tensor
    """(B, N), int64: the trained tokens of completions, -100 elsewhere."""
    before: torch.Tensor
    """Position of the token before each completion token, (B, T), int64; what padding has is of no
    account."""


def align(rows: Mapping[str, torch.Tensor]) -> Aligned:
    """Move the rows of `collate`, whose prompts are padded on the left, to the left."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)  # (B, P + T)
    lengths = rows["prompt_mask"].sum(dim=1, keepdim=True)  # (B, 1)
    ends = lengths + rows["completion_mask"].sum(dim=1, keepdim=True)  # (B, 1)
    places = torch.arange(int(ends.max()), device=ids.device)[None]  # (1, N)
    padding = rows["prompt_ids"].size(1) - lengths
    input_ids = ids.gather(1, (places + padding).clamp(max=ids.size(1) - 1))
    width = rows["completion_ids"].size(1)
    is_trained = rows["tool_mask"].gather(1, (places - lengths).clamp(min=0, max=width - 1)) > 0
    is_trained &= (places >= lengths) & (places < ends)
    before = lengths - 1 + torch.arange(width, device=ids.device)[None]
    return Aligned(
        input_ids,
        input_ids.masked_fill(~is_trained, -100),
        before.clamp(max=places.size(1) - 1),
    )


class TokenScores(NamedTuple):
    """Scores of the trained tokens of completions; other places have 0."""

    logprobs: torch.Tensor
    """(B, T)."""
    entropies: torch.Tensor | None
    """(B, T); None from a model whose head gives none, as the reference."""
    before: torch.Tensor
    """Position in the last forward pass of the body from which each token was predicted, (B, T),
    int64."""


def has_plain_attention(config: Any) -> bool:
    """Return whether a text model has full attention with an explicit mask in all layers.

    Attention must not depend on what else is in the batch, as the frequencies of longrope do.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        set(kinds) == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and original_context(config) is None
        and config._attn_implementation in ("sdpa", "eager")
        and not config.is_encoder_decoder
    )


def original_context(config: Any) -> int | None:
    """Return the length beyond which longrope rotates all tokens of a batch differently, if any."""
    rope = getattr(config, "rope_parameters", None) or {}
    length = rope.get("original_max_position_embeddings")
    return int(length) if rope.get("rope_type") == "longrope" and length else None


def can_share(model: Any) -> bool:
    """Return whether an unwrapped causal model may continue from a cache with a gradient."""
    config = model.config.get_text_config()
    return (
        has_plain_attention(config)
        and not getattr(config, "attention_dropout", 0.0)  # each row would have had its own
        # Checkpointing keeps no keys and values.
        and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    )


def shares_rightly(probe: Probe, body: Any) -> bool:
    """Return whether rows that share a prompt get the scores of rows alone."""
    rows = probe.rows()
    groups = group_rows(rows["prompt_ids"], rows["prompt_mask"])
    return probe.agrees(forward_shared(probe.model, body, rows, groups).logprobs)


def check_rows(model: Any, temperature: float) -> None:
    """Refuse a model that scores rows of a batch unlike rows alone, or gives no gradient.

    `model` is unwrapped, and has TRL's fused head with this `temperature`.
    """
    reason = "its log-probabilities of a row depend on later tokens, or its head is not linear"
    try:
        with without_dropout(model), in_float32(model):
            probe = Probe(model, temperature)
            logprobs = forward_rows(model, probe.rows()).logprobs
            trained = next(weight for weight in model.parameters() if weight.requires_grad)
            torch.autograd.grad(logprobs.sum(), trained, allow_unused=True)
            if probe.agrees(logprobs):
                return
    except Exception as error:  # noqa: BLE001 - foreign code raises many kinds
        reason = f"{type(error).__name__}: {error}"
    raise ConfigurationError(
        f"Models of type {model.config.model_type!r} cannot be trained: {reason}. Use a "
        "decoder-only language model."
    )


def find_groups(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, width: int
) -> RowGroups | None:
    """Group rows by their prompts, (B, P); None where sharing saves too little.

    `width` is T, the tokens of the completions.
    """
    groups = group_rows(prompt_ids, prompt_mask)
    num_rows, length = prompt_ids.shape
    saved = (num_rows - len(groups.firsts)) * (length - 1)
    return groups if saved >= MIN_SAVED_SHARE * num_rows * (length + width) else None


def forward_rows(model: Any, rows: Mapping[str, torch.Tensor]) -> TokenScores:
    """Score the completions of rows, each with its own prompt.

    Relies on: TRL's fused head, which takes labels and returns ``log_probs`` and ``entropy`` of all
    positions but the first.
    """
    aligned = align(rows)
    output = model(
        input_ids=aligned.input_ids,
        labels=aligned.labels,
        fused_lm_head=True,
        **without_router_loss(model),
    )
    # The first position is not scored, so the score of a token is at the position before it.
    places = aligned.before.clamp(max=output.log_probs.size(1) - 1)
    entropies = None if output.entropy is None else output.entropy.gather(1, places)
    return TokenScores(output.log_probs.gather(1, places), entropies, aligned.before)


def forward_shared(
    model: Any, body: Any, rows: Mapping[str, torch.Tensor], groups: RowGroups
) -> TokenScores:
    """Score the completions of rows that begin with prompts in common.

    Relies on: what `forward_rows` does, and a model that continues from a `DynamicCache` with
    a gradient. `model` may be wrapped; `body` is the same without its language-model head,
    unwrapped. `rows` are those of `collate`.
    """
    cache = DynamicCache(config=body.config)
    width = rows["completion_ids"].size(1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)  # (B, P + T)
    # Prompts are padded on the left; not all models count positions by the mask.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(body.forward).parameters
    before, after = (
        {"position_ids": part} if takes_positions else {}
        for part in (positions[groups.firsts, : -width - 1], positions[:, -width - 1 :])
    )
    # The last token of the prompt goes with the completion: what follows it is scored.
    body(
        input_ids=rows["prompt_ids"][groups.firsts, :-1],  # (U, P - 1)
        attention_mask=rows["prompt_mask"][groups.firsts, :-1],
        use_cache=True,
        **cache_argument(body, cache),
        **before,
    )
    _hand_out(cache, groups.group)
    input_ids = torch.cat([rows["prompt_ids"][:, -1:], rows["completion_ids"]], dim=1)
    labels = torch.full_like(input_ids, -100)
    labels[:, 1:] = rows["completion_ids"].masked_fill(rows["tool_mask"] == 0, -100)
    output = model(
        input_ids=input_ids,  # (B, 1 + T)
        attention_mask=mask,
        labels=labels,
        fused_lm_head=True,
        **cache_argument(body, cache),
        **after,
        **without_router_loss(model),
    )
    places = torch.arange(width, device=input_ids.device).expand(len(input_ids), width)
    return TokenScores(output.log_probs, output.entropy, places)


def _hand_out(cache: DynamicCache, group: Sequence[int]) -> None:
    for layer in cache.layers:
        layer.keys = pick_rows(layer.keys, group)
        layer.values = pick_rows(layer.values, group)
