"""Sampling with ``model.generate`` from the episodes' own random generators.

A token is drawn by inverting the cumulative distribution at one uniform number per row. So what an
episode samples depends neither on the other episodes of its batch nor on the number of processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agent_trainers.batching.probe import Probe, without_router_loss
from agent_trainers.policies.guided import Guide

Warper = Callable[[Any, torch.Tensor], torch.Tensor]
"""A function of input ids, which ours ignore, and scores (B, V)."""
_LEAST_LOGPROB: Final = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Parameters of sampling."""

    max_new_tokens: int
    """Longest turn, in tokens."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a turn."""
    pad_token_id: int = 0
    temperature: float = 1.0
    """Divides the logits; 0 for greedy decoding."""
    top_p: float = 1.0
    """Nucleus: keeps the smallest set of tokens with this probability."""
    top_k: int = 0
    """Keeps this many most likely tokens; 0 keeps all."""
    min_p: float | None = None
    """Drops tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Penalty on tokens already seen; 1.0 for none."""

    @property
    def is_truncated(self) -> bool:
        """Whether the sampling distribution differs from the model's at `temperature`."""
        is_cut = self.top_p < 1.0 or self.top_k > 0 or self.min_p is not None
        return is_cut or self.repetition_penalty != 1.0 or self.temperature == 0.0

    @property
    def distribution(self) -> dict[str, float]:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) or 0.0 for name in names}

    def warpers(self) -> LogitsProcessorList:
        warpers = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k > 0:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled tokens of one turn."""

    token_ids: list[int]
    """Tokens, including the end-of-turn token."""
    logprobs: npt.NDArray[np.float32]
    """Log-probability of each under the sampling distribution."""


class SeededSampling(LogitsProcessor):  # type: ignore[misc]
    """Draws the next token and leaves ``generate``'s argmax no other choice.

    Must be the last processor. Relies on ``generate`` calling the processors once per new token.
    """

    def __init__(
        self,
        uniforms: torch.Tensor | None,
        warpers: Sequence[Warper] = (),
        guides: Sequence[Guide | None] = (),
    ) -> None:
        """Draw at `uniforms`, shape (B, T) in [0, 1), or greedily if None; else see `draw`."""
        self._uniforms, self._warpers, self._guides = uniforms, warpers, guides
        self.logprobs: list[torch.Tensor] = []  # one (B,) per new token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores (B, V) that are finite at the drawn token only."""
        points = None if self._uniforms is None else self._uniforms[:, len(self.logprobs)]
        tokens, logprobs = draw(scores, points, self._warpers, self._guides)
        self.logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens[:, None], 0.0)


def draw(
    scores: torch.Tensor,
    points: torch.Tensor | None,
    warpers: Sequence[Warper] = (),
    guides: Sequence[Guide | None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row by inverting the cumulative distribution.

    Args:
        scores: Logits, (B, V).
        points: Uniform numbers, (B,) in [0, 1), double; None for the most likely token.
        warpers: Change the distribution.
        guides: Restrict the tokens of each row, and advance by the drawn ones.

    Returns:
        Tokens (B,), int64, and their log-probabilities (B,), double, as if there were no guides:
        those that a trainer computes again.
    """
    device = scores.device
    if device.type == "mps":  # has no double precision
        scores = scores.cpu()
    logprobs = drawn = _log_softmax(scores, warpers)
    if any(guides):
        everything = torch.ones(scores.size(-1), dtype=torch.bool)
        allowed = torch.stack([guide.allowed() if guide else everything for guide in guides])
        drawn = _log_softmax(scores.masked_fill(~allowed.to(scores.device), -torch.inf), warpers)
        logprobs = logprobs.clamp(min=_LEAST_LOGPROB)  # a warper may drop the only allowed token
    if points is None:
        tokens = drawn.argmax(dim=-1, keepdim=True)
    else:
        # double: float32 sums over a large vocabulary would favour its first tokens
        cumulative = drawn.exp().cumsum(dim=-1)
        mass = points[:, None].to(cumulative.device) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, mass, right=True)
        tokens.clamp_(max=scores.size(-1) - 1)
    for row, guide in enumerate(guides):
        if guide:
            guide.accept(int(tokens[row]))
    return tokens.squeeze(-1).to(device), logprobs.gather(-1, tokens).squeeze(-1)


def _log_softmax(scores: torch.Tensor, warpers: Sequence[Warper]) -> torch.Tensor:
    for warper in warpers:
        scores = warper(None, scores)
    return scores.double().log_softmax(dim=-1)


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    rngs: Sequence[np.random.Generator],
    settings: SamplingSettings,
    guides: Sequence[Guide | None] = (),
) -> list[Completion]:
    """Sample one completion per prompt, from `max_new_tokens` numbers of each of `rngs`.

    `guides` are empty, or one per prompt.
    """
    if not prompts:
        return []
    rows = [torch.tensor(prompt) for prompt in prompts]
    input_ids = pad_sequence(rows, True, settings.pad_token_id, padding_side="left")
    attention_mask = pad_sequence([torch.ones_like(r) for r in rows], True, padding_side="left")
    uniforms = None
    if settings.temperature > 0:
        draws = np.stack([rng.random(settings.max_new_tokens) for rng in rngs])
        uniforms = torch.from_numpy(draws)
    sampling = SeededSampling(uniforms, settings.warpers(), guides)
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        eos_token_id=list(settings.eos_token_ids),
        pad_token_id=settings.pad_token_id,
        do_sample=False,  # SeededSampling draws
        repetition_penalty=settings.repetition_penalty,
        disable_compile=True,
    )
    # generate takes missing values from the model's own; PEFT hands its own down to the inner model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    own, model.generation_config = model.generation_config, config
    try:
        output = model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            logits_processor=LogitsProcessorList([sampling]),
            **without_router_loss(model),
        )
    finally:
        model.generation_config = inner.generation_config = own
    token_ids = output[:, input_ids.size(1) :].cpu()  # (B, T)
    logprobs = torch.stack(sampling.logprobs, dim=1).float().cpu().numpy()  # (B, T)
    completions = []
    for ids, logp in zip(token_ids.tolist(), logprobs, strict=True):
        ends = (i for i, token in enumerate(ids, start=1) if token in settings.eos_token_ids)
        length = next(ends, len(ids))
        completions.append(Completion(token_ids=ids[:length], logprobs=logp[:length].copy()))
    return completions


def samples_rightly(probe: Probe) -> bool:
    """Return whether tokens are sampled in a batch with the log-probabilities of rows alone."""
    settings = SamplingSettings(max_new_tokens=3, eos_token_ids=(), temperature=0.0)
    turns = sample(probe.model, probe.prompts, [], settings)
    return probe.agrees([turn.logprobs for turn in turns], [turn.token_ids for turn in turns])
