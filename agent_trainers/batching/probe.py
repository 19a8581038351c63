"""Probe: short rows that show what a model supports, by comparison with each row alone.

Padding, caches and TRL's fused head give most models the scores of a row alone, but not all: some
attend to later tokens, count positions without a mask, or transform hidden states in their head.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from agent_trainers.batching.collate import collate
from agent_trainers.batching.rows import Row

_PROMPTS: Final = (list(range(3, 12)), list(range(3, 12)), list(range(5, 10)))
_COMPLETIONS: Final = (list(range(12, 16)), list(range(16, 22)), list(range(11, 16)))
_ROUNDING: Final = 4e3
"""Accepted difference in units of the precision, since batches add in another order: those
of SmolLM2-135M (30 layers) differ by 1,000."""
_MAX_DIFFERENCE: Final = 0.3
"""Accepted difference relative to the spread of log-probabilities, whatever the precision: in
bfloat16, a batch of SmolLM2-135M differs by 0.08 from rows alone, and these by 0.18 from float32.
"""
_LEAST_SPREAD: Final = 0.1
"""Smallest spread, in nats, with which a difference is compared: log-probabilities of the most
likely tokens can be almost equal.
"""
_TINY_VOCABULARY: Final = 1000


class Probe:
    """Short rows for an unwrapped causal model."""

    def __init__(self, model: Any, temperature: float = 1.0) -> None:
        self.model, self._temperature = model, temperature
        size = vocabulary_size(model)
        self.prompts = [[token % size for token in ids] for ids in _PROMPTS]
        self.completions = [[token % size for token in ids] for ids in _COMPLETIONS]

    def rows(self) -> dict[str, torch.Tensor]:
        """Return the rows as tensors."""
        rows = [
            Row(0, prompt, ids, is_action=[True] * len(ids), is_trained=[True] * len(ids))
            for prompt, ids in zip(self.prompts, self.completions, strict=True)
        ]
        device = self.model.device
        return {name: tensor.to(device) for name, tensor in collate(rows, 0).items()}

    @torch.no_grad()
    def agrees(self, logprobs: Any, completions: Sequence[Sequence[int]] | None = None) -> bool:
        """Return whether log-probabilities of tokens, (B, T), are those of each row alone.

        The tokens are those of `completions`, or of the probe's own.
        """
        found, expected = [], []
        for prompt, ids, row in zip(
            self.prompts, completions or self.completions, logprobs, strict=True
        ):
            scores = self._score_alone([*prompt, *ids])[len(prompt) - 1 : -1]
            tokens = torch.tensor(ids, device=scores.device)
            expected.append(scores.gather(1, tokens[:, None])[:, 0])
            found.append(torch.as_tensor(row[: len(ids)], device=scores.device))
        wanted = torch.cat(expected)
        difference, spread = torch.cat(found).float() - wanted, wanted - wanted.mean()
        least = _LEAST_SPREAD * len(wanted) ** 0.5
        return bool(difference.norm() <= self._tolerance * spread.norm().clamp(min=least))

    def _score_alone(self, token_ids: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([token_ids], device=self.model.device)
        logits: torch.Tensor = self.model(input_ids=ids, **without_router_loss(self.model)).logits
        return (logits[0].float() / self._temperature).log_softmax(dim=-1)  # (N, V)

    @property
    def _tolerance(self) -> float:
        device = self.model.device.type  # accelerators may multiply in TF32
        is_exact = device == "cpu" and not torch.is_autocast_enabled(device)
        if not is_exact or getattr(self.model, "hf_quantizer", None):
            return _MAX_DIFFERENCE
        return min(_ROUNDING * torch.finfo(self.model.dtype).eps, _MAX_DIFFERENCE)


def supports(model: Any, agrees: Callable[[Probe], bool], temperature: float = 1.0) -> bool:
    """Return whether a way of scoring works with a model and gives what rows alone give."""
    try:
        with torch.no_grad(), without_dropout(model), in_float32(model):
            return agrees(Probe(model, temperature))
    except Exception:  # noqa: BLE001 - foreign code: the model does not support it
        return False


def drops_out(model: Any) -> bool:
    """Return whether any module drops out in training, by a module or by a rate of its own."""
    return any(
        isinstance(rate, float) and rate > 0 and (name == "p" or "drop" in name)
        for module in model.modules()
        for name, rate in vars(module).items()
    )


@contextmanager
def without_dropout(*models: Any) -> Iterator[None]:
    """Switch dropout off, as in inference."""
    was_training = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, was_training, strict=True):
            model.train(training)


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Switch autocast off where the weights are in float32: its rounding hides differences."""
    needs_autocast = "flash" in str(model.config._attn_implementation)
    if model.dtype != torch.float32 or needs_autocast or getattr(model, "hf_quantizer", None):
        yield
    else:
        with torch.autocast(model.device.type, enabled=False):
            yield


def vocabulary_size(model: Any) -> int:
    """Return the number of tokens for which a model or a configuration has logits."""
    return int(getattr(model, "config", model).get_text_config().vocab_size)


def is_tiny(model: Any) -> bool:
    """Return whether a model is one for tests and examples, by its vocabulary."""
    return vocabulary_size(model) < _TINY_VOCABULARY


def without_router_loss(model: Any) -> dict[str, bool]:
    """Return the model arguments that switch off a mixture's own auxiliary loss.

    It would be the loss of one forward pass, with a mask that does not fit a cache.
    """
    config = getattr(model, "module", model).config.get_text_config()
    return {"output_router_logits": False} if hasattr(config, "output_router_logits") else {}


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument that passes a cache to a model, which may have adapters.

    transformers 5.24 calls it ``cache``; earlier versions and other models ``past_key_values``.
    """
    inner = getattr(model, "get_base_model", lambda: model)()
    return {_cache_name(type(inner).forward): cache}


@functools.cache
def _cache_name(forward: Callable[..., Any]) -> str:
    names = inspect.signature(forward).parameters
    return "cache" if "cache" in names else "past_key_values"
