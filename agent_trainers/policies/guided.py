"""Guided decoding: turns that follow a structural tag, by xgrammar.

A structural tag is a form of texts as JSON, which vLLM reads, too: literal parts, JSON schemas, and
combinations of both.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerBase

from agent_envs.core.lookup import require_extra
from agent_envs.errors import ConfigurationError

_CACHED: Final = 64
"""Compiled tags: the episodes of a program have the same tools."""
_WORD_BITS: Final = 32


class Guide:
    """The tokens that may come next in one turn."""

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    def allowed(self) -> torch.Tensor:
        """Return which tokens may come next, (V,)."""
        if self._matcher.is_terminated():
            return torch.ones(self._vocab_size, dtype=torch.bool)
        self._matcher.fill_next_token_bitmask(self._bits)
        bits = self._bits[0, :, None] >> torch.arange(_WORD_BITS, dtype=self._bits.dtype)
        allowed: torch.Tensor = (bits & 1).bool().flatten()[: self._vocab_size]
        return allowed

    def accept(self, token: int) -> None:
        """Advance by a sampled token."""
        if not self._matcher.is_terminated():
            self._matcher.accept_token(token)


class Guides:
    """Guides for one tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Prepare for a model with logits of `vocab_size` tokens."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiler: Any = None
        self._compile = lru_cache(_CACHED)(self._compile_text)

    def start(self, guide: Mapping[str, Any]) -> Guide:
        """Return the guide of a new turn; a `ConfigurationError` if there can be none."""
        return Guide(self._compile(json.dumps(guide)), self._vocab_size)

    def _compile_text(self, guide: str) -> Any:
        if type(self._tokenizer.backend_tokenizer.model).__name__ == "WordLevel":
            raise ConfigurationError("guided decoding needs a tokenizer of parts of words.")
        require_extra("guided", "guided decoding", "xgrammar")
        import xgrammar

        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
            )
            self._compiler = xgrammar.GrammarCompiler(info)
        try:
            return self._compiler.compile_structural_tag(guide)
        except Exception as error:  # noqa: BLE001 - of many types, for foreign schemas
            reason = str(error).strip().rpartition("] ")[2]  # without a place in C++
            raise ConfigurationError(f"guided decoding failed: {reason}") from None
