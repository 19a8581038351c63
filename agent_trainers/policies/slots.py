"""Continuous batching on a transformers model with a KV-cache slot per episode.

A later request of an episode only prefills the new tokens of its state, and what first states have
in common, such as a system prompt, is computed once. Other episodes keep generating while a tool
runs. Every token is drawn from its episode's own generator, so what an episode samples only depends
on its own state.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn.functional import pad

from agent_trainers.batching.micro_batch import pack
from agent_trainers.batching.probe import Probe, cache_argument, supports, without_router_loss
from agent_trainers.batching.shared_prefix import has_plain_attention
from agent_trainers.policies.guided import Guide
from agent_trainers.policies.policy import GenerationRequest, GenerationStream, StreamedResult
from agent_trainers.policies.sampling import Completion, SamplingSettings, draw

if TYPE_CHECKING:
    from agent_trainers.policies.local import TokenPolicy

_GROWTH: Final = 256
"""Tokens by which slots grow."""
_PREFILL_SHARE: Final = 0.25
"""Share of the batch from which on new states are prefilled while others decode."""
_PREFILL_TOKENS: Final = 16_384
"""Tokens of a prefill batch, padding included."""
_CPU_PREFILL_TOKENS: Final = 512
"""The same on CPUs, where a larger batch is no faster and has more padding."""
_LEAST_SHARED: Final = 32
"""Tokens that first states must have in common for a forward pass over these alone."""
_SPAN: Final = 3
"""Largest ratio of decoded slots, including idle ones in between, to those in use."""


def can_serve(model: Any, settings: SamplingSettings) -> bool:
    """Return whether slots support a model: full attention with an explicit mask, rotary positions.

    Others (sliding windows, recurrent layers, flash attention, a repetition penalty) generate in
    batches by ``model.generate``.
    """
    config = model.config.get_text_config()
    names = ("rope_parameters", "rope_theta")
    return (
        has_plain_attention(config)
        and any(getattr(config, name, None) for name in names)
        and not getattr(model, "_is_stateful", False)
        and settings.repetition_penalty == 1.0
        and supports(model, _agrees)
    )


class SlotCache:
    """Keys and values of all slots, with the interface of a transformers cache.

    Relies on a model calling ``update(keys, values, layer)`` once per layer, and on using a
    four-dimensional mask unchanged.
    """

    is_compileable = False

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # each (H, length, D)
        self._slots = torch.zeros(0, dtype=torch.long)
        self._read: slice | torch.Tensor = slice(0)
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._width = self.num_slots = self.capacity = 0

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Grow to this size, keeping the content."""
        num_slots = max(num_slots, self.num_slots)
        capacity = max(-(-capacity // _GROWTH) * _GROWTH, self.capacity)
        added = (0, 0, 0, capacity - self.capacity, 0, 0, 0, num_slots - self.num_slots)
        if any(added):
            for layer, (keys, values) in self._layers.items():
                self._layers[layer] = (pad(keys, added), pad(values, added))
        self.num_slots, self.capacity = num_slots, capacity

    def set_write_positions(
        self, slots: Sequence[int], positions: torch.Tensor, width: int
    ) -> None:
        """Set slots (B,) and positions (B, T) of the next tokens, and the `width` to read."""
        self._slots = torch.tensor(slots, device=positions.device)
        # All of the first slots can be read without a copy.
        is_first = list(slots) == list(range(len(slots)))
        self._read = slice(len(slots)) if is_first else self._slots
        self._positions, self._width = positions, width

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, H, T, D) and return the content of the slots, (B, H, width, D)."""
        if layer not in self._layers:
            size = (self.num_slots, keys.size(1), self.capacity)
            self._layers[layer] = (
                keys.new_zeros(*size, keys.size(3)),
                values.new_zeros(*size, values.size(3)),
            )
        rows = self._slots[:, None]  # (B, 1)
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[rows, :, self._positions] = new.transpose(1, 2)  # (B, T, H, D)
        found = tuple(s[self._read, :, : self._width] for s in self._layers[layer])
        return found[0], found[1]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for stored in self._layers.values():
            for tensor in stored:
                tensor[list(targets), :, :length] = tensor[source, :, :length]

    def share(self, source: int, length: int) -> None:
        """Keep the first tokens of a slot for `copy_shared`."""
        self._shared = {
            layer: (keys[source, :, :length].clone(), values[source, :, :length].clone())
            for layer, (keys, values) in self._layers.items()
        }

    def copy_shared(self, target: int, length: int) -> None:
        for layer, shared in self._shared.items():
            for stored, tensor in zip(self._layers[layer], shared, strict=True):
                stored[target, :, :length] = tensor[:, :length]

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: positions are always explicit."""
        return 0


def forward_slots(
    model: Any, cache: SlotCache, slots: list[int], starts: list[int], tokens: list[list[int]]
) -> torch.Tensor:
    """Run tokens from positions `starts` of their slots on; return logits (B, 1, V)."""
    device, dtype = model.device, model.dtype
    longest, trash = max(map(len, tokens)), cache.capacity - 1
    input_ids = [[*ids, *[0] * (longest - len(ids))] for ids in tokens]
    ends = [start + len(ids) for start, ids in zip(starts, tokens, strict=True)]
    positions = torch.tensor(  # (B, T); padding goes to the last, unused position
        [
            [*range(start, end), *[trash] * (longest - end + start)]
            for start, end in zip(starts, ends, strict=True)
        ],
        device=device,
    )
    width = max(ends)
    cache.set_write_positions(slots, positions, width)
    is_hidden = torch.arange(width, device=device) > positions[:, None, :, None]
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)  # (B, 1, T, width)
    mask.masked_fill_(is_hidden, torch.finfo(dtype).min)
    logits: torch.Tensor = model(
        input_ids=torch.tensor(input_ids, device=device),
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **cache_argument(model, cache),
        **without_router_loss(model),
    ).logits
    return logits


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _agrees(probe: Probe) -> bool:
    """Return whether slots give the distributions of next tokens that rows alone give."""
    cache, prompts = SlotCache(), probe.prompts
    slots = list(range(len(prompts)))
    cache.reserve(len(slots), max(map(len, prompts)) + 1)
    forward_slots(probe.model, cache, slots, [0] * len(slots), [ids[:-1] for ids in prompts])
    last = [len(ids) - 1 for ids in prompts]
    logits = forward_slots(probe.model, cache, slots, last, [ids[-1:] for ids in prompts])
    likely = logits[:, -1].float().log_softmax(dim=-1).max(dim=-1)
    return probe.agrees(likely.values[:, None], likely.indices[:, None].tolist())


@dataclass(slots=True)
class _Turn:
    """A state in a slot, and the tokens sampled so far."""

    slot: int
    prompt: list[int]
    uniforms: np.ndarray[Any, np.dtype[np.float64]] | None
    num_stored: int
    """Prompt tokens whose keys and values are in the slot."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    guide: Guide | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Tokens to prefill before the last one, which gives the first new token."""
        return len(self.context) - 1 - self.num_stored

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        return self.prompt + self.token_ids


class SlotStream(GenerationStream):
    """A batch of at most `max_slots` episodes that changes token by token."""

    def __init__(self, policy: "TokenPolicy", model: AbstractContextManager[Any]) -> None:
        """Enter the context `model`, which lasts for one rollout."""
        super().__init__()
        self._context = ExitStack()
        self._model = self._context.enter_context(model)
        self._policy, self._settings = policy, policy.settings
        self._cache = SlotCache()
        self._free: list[int] = []
        self._stored: dict[int, tuple[int, list[int]]] = {}  # by episode: slot, tokens in it
        self._prefilling: dict[int, _Turn] = {}
        self._decoding: dict[int, _Turn] = {}
        self._shared: list[int] = []  # tokens with which first states begin
        self._idle: dict[int, None] = {}  # episodes whose slots may be reclaimed, oldest first

    @property
    def has_requests(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, key: int, request: GenerationRequest) -> None:
        super().add(key, request)
        self._idle.pop(key, None)

    def drop(self, key: int) -> None:
        for turns in (self._waiting, self._prefilling, self._decoding, self._idle):
            turns.pop(key, None)
        if key in self._stored:
            self._free.append(self._stored.pop(key)[0])

    def mark_idle(self, key: int) -> None:
        if key in self._stored:
            self._idle[key] = None

    def refresh(self) -> None:
        """Compute all keys and values again, of unfinished turns before their next token."""
        self._stored = {key: (slot, []) for key, (slot, _) in self._stored.items()}
        self._shared = []
        self._prefilling |= self._decoding
        self._decoding = {}
        for turn in self._prefilling.values():
            turn.num_stored = 0

    def close(self) -> None:
        self._context.close()
        self._cache = SlotCache()

    @torch.no_grad()
    def advance(self) -> list[StreamedResult]:
        """Admit pending requests, prefill, and decode one token for all others."""
        ready = self._admit()
        enough = _PREFILL_SHARE * (len(self._prefilling) + len(self._decoding))
        if self._prefilling and (not self._decoding or len(self._prefilling) >= enough):
            self._prefill()
        if self._decoding:
            self._decode()
        return ready + self._finished()

    def _admit(self) -> list[StreamedResult]:
        """Assign slots to pending requests; return those whose state does not fit."""
        ready: list[StreamedResult] = []
        for key, request in list(self._waiting.items()):
            if key not in self._stored and len(self._stored) >= self._policy.max_slots:
                if not self._idle:
                    continue
                self.drop(next(iter(self._idle)))
            del self._waiting[key]
            prompt = self._policy.encode(request)
            if prompt is None:
                ready.append((key, self._policy.generation([], None)))
                continue
            slot, tokens = self._stored.get(key) or (None, [])
            if slot is None:
                slot = self._free.pop() if self._free else len(self._stored)
            uniforms = None
            if self._settings.temperature > 0:
                uniforms = request.rng.random(self._settings.max_new_tokens)
            self._stored[key] = (slot, prompt)
            guide = self._policy.start_guide(request.guide)
            known = num_common(tokens, prompt[:-1])
            self._prefilling[key] = _Turn(slot, prompt, uniforms, known, request.is_over, guide)
        return ready

    def _prefill(self) -> None:
        """Store keys and values of new states, of what first states have in common once."""
        turns = list(self._prefilling.values())
        equal: dict[tuple[int, ...], list[_Turn]] = {}
        for turn in turns:
            if turn.num_missing > 0 and turn.num_stored == 0:
                equal.setdefault(tuple(turn.context), []).append(turn)
        later_turns = [turn for turn in turns if turn.num_stored > 0]
        longest = max(len(turn.context) for turn in turns)
        num_slots = max(slot for slot, _ in self._stored.values()) + 1
        self._cache.reserve(num_slots, longest + self._settings.max_new_tokens + 1)
        first_turns = [group[0] for group in equal.values()]
        self._share(first_turns)
        new = [turn for turn in (*later_turns, *first_turns) if turn.num_missing > 0]
        is_on_cpu = self._model.device.type == "cpu"
        for batch in pack(
            [0] * len(new),
            [turn.num_missing for turn in new],
            max_rows=len(new),
            max_tokens=_CPU_PREFILL_TOKENS if is_on_cpu else _PREFILL_TOKENS,
        ):
            some = [new[i] for i in batch]
            tokens = [turn.context[turn.num_stored : -1] for turn in some]
            slots, starts = [t.slot for t in some], [t.num_stored for t in some]
            forward_slots(self._model, self._cache, slots, starts, tokens)
        for first, *others in equal.values():
            if others:
                length = len(first.context) - 1
                self._cache.copy(first.slot, [turn.slot for turn in others], length)
        self._decoding |= self._prefilling
        self._prefilling = {}

    def _share(self, first_turns: Sequence[_Turn]) -> None:
        """Copy the tokens that states have in common, after computing them if necessary."""
        contexts = [turn.context[:-1] for turn in first_turns]
        length = min((num_common(contexts[0], other) for other in contexts[1:]), default=0)
        if length >= _LEAST_SHARED and num_common(contexts[0], self._shared) < length:
            slot, self._shared = first_turns[0].slot, contexts[0][:length]
            forward_slots(self._model, self._cache, [slot], [0], [self._shared])
            self._cache.share(slot, length)
        for turn, context in zip(first_turns, contexts, strict=True):
            turn.num_stored = num_common(context, self._shared)
            self._cache.copy_shared(turn.slot, turn.num_stored)

    def _decode(self) -> None:
        turns = sorted(self._decoding.values(), key=lambda turn: turn.slot)
        slots = [turn.slot for turn in turns]
        starts = dict.fromkeys(slots, 0)
        # Idle slots in between take part without a token, which is cheaper than copying the
        # others' content unless there are many.
        if slots[-1] < _SPAN * len(slots):
            starts = dict.fromkeys(range(slots[-1] + 1), 0)
        tokens: dict[int, list[int]] = {slot: [] for slot in starts}
        for turn in turns:
            tokens[turn.slot] = [turn.token_ids[-1] if turn.token_ids else turn.prompt[-1]]
            starts[turn.slot] = len(turn.prompt) - 1 + len(turn.token_ids)
        logits = forward_slots(
            self._model, self._cache, list(starts), list(starts.values()), list(tokens.values())
        )
        if len(starts) > len(slots):
            logits = logits[slots]
        scores = logits[:, -1].float()  # (B, V)
        points = None
        if self._settings.temperature > 0:
            numbers = [t.uniforms[len(t.token_ids)] for t in turns if t.uniforms is not None]
            points = torch.tensor(numbers, dtype=torch.float64)
        guides = [turn.guide for turn in turns]
        drawn, logprobs = draw(scores, points, self._settings.warpers(), guides)
        for turn, token, logprob in zip(turns, drawn.tolist(), logprobs.tolist(), strict=True):
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)

    def _finished(self) -> list[StreamedResult]:
        """Remove and return the ended turns; their slots keep the tokens."""
        ready: list[StreamedResult] = []
        for key, turn in list(self._decoding.items()):
            is_ended = turn.token_ids[-1] in self._settings.eos_token_ids or (
                turn.is_over is not None and turn.is_over(turn.token_ids)
            )
            if is_ended or len(turn.token_ids) >= self._settings.max_new_tokens:
                del self._decoding[key]
                # The last token has no keys and values yet.
                self._stored[key] = (turn.slot, [*turn.prompt, *turn.token_ids[:-1]])
                logprobs = np.array(turn.logprobs, np.float32)
                completion = Completion(token_ids=turn.token_ids, logprobs=logprobs)
                ready.append((key, self._policy.generation(turn.prompt, completion)))
        return ready
