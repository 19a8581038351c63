"""Forward passes over rows, by TRL's fused head: each by itself, or with prompts in common.

The members of a group begin with the same state. Its keys and values are computed once and handed
to every row; gradients come back through them and add up. The result is the same as row by row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import DynamicCache

from agent_trainers.batching.alignment import align
from agent_trainers.batching.packing import RowGroups, group_rows, pick_rows

MIN_SAVED_SHARE: Final = 0.1
"""Below this share of all tokens the second pass costs more than it saves (measured: at 0.2 the
work is 0.84 of what it was, at 0.57 it is 0.44)."""


def can_share(model: Any) -> bool:
    """Say whether a model can go on from keys and values with a gradient.

    Args:
        model: A causal language model, unwrapped.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        set(kinds) == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and config._attn_implementation in ("sdpa", "eager")
        and not getattr(config, "attention_dropout", 0.0)  # each row would have had its own
        and not getattr(model, "is_gradient_checkpointing", False)  # it keeps no keys and values
        and not config.is_encoder_decoder
    )


def find_groups(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, width: int
) -> RowGroups | None:
    """Group rows by their prompts.

    Args:
        prompt_ids: (B, P), int64.
        prompt_mask: (B, P), int64.
        width: T, tokens of the completions.

    Returns:
        None where sharing saves too little.
    """
    groups = group_rows(prompt_ids, prompt_mask)
    num_rows, length = prompt_ids.shape
    saved = (num_rows - len(groups.firsts)) * (length - 1)
    return groups if saved >= MIN_SAVED_SHARE * num_rows * (length + width) else None


def forward_rows(model: Any, rows: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Score the completions of rows, each with its own prompt.

    Relies on: TRL's fused head, which takes labels and returns ``log_probs`` and ``entropy`` of all
    positions but the first.

    Args:
        model: The policy, wrapped or not.
        rows: See `align`.

    Returns:
        Log-probabilities and entropies of completion tokens, each (B, T); no entropies (None) from
        a model whose head gives none, as the reference.
    """
    aligned = align(rows)
    output = model(input_ids=aligned.input_ids, labels=aligned.labels, fused_lm_head=True)
    # The first position is not scored, so the score of a token stands where the one before it is.
    places = aligned.before.clamp(max=output.log_probs.size(1) - 1)
    entropies = None if output.entropy is None else output.entropy.gather(1, places)
    return output.log_probs.gather(1, places), entropies


def forward_shared(
    model: Any, body: Any, piece: Mapping[str, torch.Tensor], groups: RowGroups
) -> tuple[Any, Any]:
    """Score the completions of rows that begin with prompts in common.

    Relies on: what `forward_rows` does, and a model that goes on from a `DynamicCache` with a
    gradient.

    Args:
        model: The policy, wrapped or not.
        body: The same without its language-model head, unwrapped.
        piece: Rows, see `collate`.
        groups: Which of them begin with the same prompt.

    Returns:
        Log-probabilities and entropies of completion tokens, each (B, T).
    """
    cache = DynamicCache(config=body.config)
    # The last token of the prompt goes with the completion: what follows it is scored.
    body(
        input_ids=piece["prompt_ids"][groups.firsts, :-1],  # (U, P - 1)
        attention_mask=piece["prompt_mask"][groups.firsts, :-1],
        past_key_values=cache,
        use_cache=True,
    )
    _hand_out(cache, groups.group)
    input_ids = torch.cat([piece["prompt_ids"][:, -1:], piece["completion_ids"]], dim=1)
    mask = torch.cat([piece["prompt_mask"][:, -1:], piece["completion_mask"]], dim=1)
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    output = model(
        input_ids=input_ids,  # (B, 1 + T)
        attention_mask=torch.cat([piece["prompt_mask"][:, :-1], mask], dim=1),  # (B, P + T)
        past_key_values=cache,
        labels=labels,
        fused_lm_head=True,
    )
    return output.log_probs, output.entropy


def _hand_out(cache: DynamicCache, group: Sequence[int]) -> None:
    """Give every row the keys and values of its group's prompt."""
    for layer in cache.layers:
        layer.keys = pick_rows(layer.keys, group)
        layer.values = pick_rows(layer.values, group)
