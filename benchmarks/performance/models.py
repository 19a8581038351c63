"""Sizes and models of the training benchmarks: the embedded policy, or random weights.

Random weights cannot act, so a larger model follows a script: it computes like any model of its
size and calls the search tool in every turn, so that both sides run the same episodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from agent_trainers.cli.train import parse_arguments
from agent_trainers.trainers.config import ignore_renames

SEED: Final = 7
ENVIRONMENT: Final = "AgentR1/SyntheticMultiHop-v0"
EMBEDDED: Final = "embedded"
_SIZES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size",
)  # fmt: skip
SHAPES: Final[Mapping[str, tuple[int, ...]]] = {
    "1.5M": (192, 576, 3, 3, 3, 64),  # matrix products dominate on a CPU from about this size on
    "0.5B": (896, 4864, 24, 14, 2, 64, 151_936),  # Qwen2.5-0.5B
    "10M": (192, 576, 4, 3, 3, 64, 49_152),  # to check the prediction of memory
    "20M": (256, 768, 8, 4, 4, 64, 49_152),
    "40M": (384, 1152, 12, 6, 2, 64, 49_152),
    "70M": (512, 1536, 16, 8, 2, 64, 49_152),
    "tiny": (16, 32, 1, 2, 2, 8),  # for tests
}
"""Sizes of Qwen3-type models; with the embedded policy's vocabulary unless given."""
PEAK_FLOPS: Final[Mapping[str, float]] = {
    "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12,
}  # fmt: skip
"""Dense bfloat16 operations per second by part of the device's name, from the data sheets."""
_SPECIAL: Final = ("bos", "eos", "pad")
_CERTAIN: Final = 1e4
"""A logit above all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes of all training measurements."""

    device: str = "cpu"
    rounds: int = 5
    """Pairs per comparison."""
    step_model: str = EMBEDDED
    """Model of whole optimiser steps; any but the embedded policy follows a script."""
    gradient_model: str = "1.5M"
    """Model of gradients on merged and separate rows."""
    num_episodes: int = 128
    """Episodes of an optimiser step."""
    num_generations: int = 8
    num_steps: tuple[int, ...] = (4, 8, 16)
    """Lengths of the trajectories whose rows are merged."""
    memory_steps: int = 16
    """Length of the trajectories whose peak memory is measured."""
    num_trajectories: int = 8
    """Synthetic trajectories per batch."""
    token_budget: int = 4096
    """``max_tokens_per_micro_batch``."""
    num_slow_episodes: int = 64
    """Episodes with slow tools."""
    num_calls: int = 5
    """Tool calls of each of them."""
    fast_seconds: float = 0.01
    slow_seconds: float = 2.0
    slow_share: float = 0.05

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Options of every trainer."""
        is_cpu = self.device == "cpu"
        silence = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False}
        return {"use_cpu": is_cpu, "bf16": not is_cpu, "gradient_checkpointing": False} | silence


DEVICE_DEFAULTS: Final = {
    "cpu": Settings(),
    "cuda": Settings(
        device="cuda", step_model="0.5B", gradient_model="0.5B", num_trajectories=16,
        token_budget=16_384,
    ),
}  # fmt: skip


def make_config(options: Mapping[str, Any]) -> Any:
    """Return the trainer's settings for options of ``agent-r1-train`` by name."""
    return parse_arguments([text for k, v in options.items() for text in (f"--{k}", str(v))])[1]


def quieten() -> None:
    """Turn off output that does not concern the measurement."""
    disable_progress_bar()  # of loading models
    ignore_renames()


def load_tokenizer() -> Any:
    """Return the embedded policy's tokenizer."""
    return AutoTokenizer.from_pretrained(TINY_POLICY, padding_side="left")


def load_model(name: str, device: str, *, is_scripted: bool = False) -> Any:
    """Return ``"embedded"`` or a model of `SHAPES`, on the CPU; in bfloat16 for ``"cuda"``."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = load_tokenizer()
    if name == EMBEDDED:
        model = AutoModelForCausalLM.from_pretrained(TINY_POLICY, dtype=dtype)
    else:
        special = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in _SPECIAL}
        config = model_config(lookup(SHAPES, name, kind="model size"), len(tokenizer), **special)
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).to(dtype)
        model.generation_config = GenerationConfig(**special)
    if is_scripted:
        follow_script(model, tokenizer)
    return model


def model_config(shape: Sequence[int], vocabulary: int, **changes: Any) -> Qwen3Config:
    """Return the configuration of a shape of `SHAPES`; `vocabulary` is for those without one."""
    sizes = {"vocab_size": vocabulary} | dict(zip(_SIZES, shape, strict=False))
    settings = {"max_position_embeddings": 32_768, "tie_word_embeddings": True}
    return Qwen3Config(**(sizes | settings | changes))


def follow_script(model: Any, tokenizer: Any) -> None:
    """Make a model call ``search`` in every turn, without changing its computation.

    The tokens of the call are all different, so each determines the next one, whose logit is
    raised. Training has no logits (TRL fuses the last layer with the loss), so log-probabilities
    drift: set ``max_logprob_drift=None``.
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
    """Return tokens per second and the model FLOP utilisation.

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
