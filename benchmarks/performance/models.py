"""The models that are measured: the embedded policy, and larger ones with random weights.

Random weights cannot act, so a larger model follows a script: it computes what any model of its
size computes, and says what the script says, a search in each turn. Both sides of a comparison then
play the same episodes, up to the turn limit.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from agent_envs.core.lookup import lookup
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_trainers import TINY_POLICY

Shape = dict[str, int]


def _shape(width: int, hidden: int, layers: int, heads: int, key_heads: int, head: int) -> Shape:
    return {
        "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": head,
    }  # fmt: skip


EMBEDDED: Final = "embedded"
SHAPES: Final[Mapping[str, Shape]] = {
    # on a CPU, sums of products take most of the time from about here on
    "1.5M": _shape(192, 576, 3, 3, 3, 64),
    # the measures of Qwen2.5-0.5B
    "0.5B": _shape(896, 4864, 24, 14, 2, 64) | {"vocab_size": 151_936},
    # for tests
    "tiny": _shape(16, 32, 1, 2, 2, 8),
}
"""Sizes of Qwen3-type models; with the embedded policy's words where they name no vocabulary."""
PEAK_FLOPS: Final[Mapping[str, float]] = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 operations per second by a part of the device's name, from the makers' sheets."""

_SPECIAL: Final = ("bos", "eos", "pad")
_CERTAIN: Final = 1e4
"""A logit beyond all others."""


def quieten() -> None:
    """Leave out what nobody who measures can act upon."""
    disable_progress_bar()  # transformers' bars for loading; ours stay
    # transformers 5.23 deprecates names that TRL 1.16 uses
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)


def load_tokenizer() -> Any:
    """Return the embedded policy's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left")


def load_model(name: str, device: str, *, is_scripted: bool = False) -> Any:
    """Return a model, on the CPU: trainers move it where they compute.

    Its name is ``"embedded"``, or one in `SHAPES`; for ``"cuda"`` its weights are bfloat16. For the
    script see `follow_script`.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = load_tokenizer()
    if name == EMBEDDED:
        model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=dtype)
    else:
        shape = {"vocab_size": len(tokenizer), **lookup(SHAPES, name, kind="model size")}
        special = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in _SPECIAL}
        config = Qwen3Config(
            **shape, **special, max_position_embeddings=4096, tie_word_embeddings=True
        )
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(dtype)
        model.generation_config = GenerationConfig(**special)
    if is_scripted:
        follow_script(model, tokenizer)
    return model


def follow_script(model: Any, tokenizer: Any) -> None:
    """Let a model compute as before, and call ``search`` in each of its turns.

    The call's tokens are all different, so the next one follows from the last: its logit is raised
    beyond all others, where there are logits. In training there are none (TRL fuses the last layer
    with the loss), so log-probabilities drift: set ``max_logprob_drift=None``.
    """
    call = TOOL_FORMATS["hermes"].write_call("search", {"query": "the director"})
    chain = tokenizer(f"assistant{call}<|im_end|>")["input_ids"]
    following = torch.full((model.config.vocab_size,), tokenizer.eos_token_id)
    following[chain[:-1]] = torch.tensor(chain[1:])

    def raise_logits(_: Any, __: Any, arguments: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "logits", None)  # (B, T, V), of the last T tokens
        if logits is None:
            return
        tokens = following.to(logits.device)[arguments["input_ids"][:, -logits.size(1) :]]
        bonus = torch.full_like(logits[..., :1], _CERTAIN)
        logits.scatter_add_(-1, tokens[..., None], bonus)

    model.register_forward_hook(raise_logits, with_kwargs=True)


def utilisation(model: Any, tokens_per_second: float) -> dict[str, Any]:
    """Return tokens per second, and the share of the device's peak that they make use of.

    Six operations per parameter and token: forward and backward.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    flops = 6 * num_parameters * tokens_per_second
    return {
        "device": name,
        "parameters": num_parameters,
        "tokens_per_second": tokens_per_second,
        "model_flops_per_second": flops,
        "model_flops_utilisation": None if peak is None else flops / peak,
    }
