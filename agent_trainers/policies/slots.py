"""Generation on a transformers model without waves: each episode has a slot in one batch.

A slot keeps the keys and values of its episode's tokens. When the episode comes back with a longer
state, only what is new goes through the model; while it is away with a tool, the others go on.
Every token is drawn from its episode's own generator, so what an episode samples depends on its own
state only, as in waves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from agent_trainers.batching.micro_batch import pack
from agent_trainers.batching.mixture import without_router_loss
from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.sampling import Completion, SamplingSettings, draw
from agent_trainers.policies.streams import GenerationStream, StreamedResult

_GROWTH: Final = 256
"""Slots grow by this many tokens."""
_PREFILL_SHARE: Final = 0.25
"""New states are read once they are this share of the batch, or nothing else is to be done."""
_READ_TOKENS: Final = 16_384
"""Tokens read at once."""
_SPAN: Final = 3
"""Slots that a token is written to, with those in between, for each that is in use."""

Prompt = Callable[[GenerationRequest], list[int] | None]
Finish = Callable[[list[int], Completion | None], Generation]
LendModel = Callable[[], AbstractContextManager[Any]]


def can_serve(model: Any, settings: SamplingSettings) -> bool:
    """Say whether slots serve a model: plain attention throughout, with a mask that is given.

    Others (sliding windows, recurrent layers, positions other than rotary ones, flash attention, a
    repetition penalty) are served in waves by ``model.generate``.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    has_rotary_positions = any(
        getattr(config, name, None) for name in ("rope_parameters", "rope_theta")
    )
    return (
        set(kinds) == {"full_attention"}
        and has_rotary_positions
        and not getattr(config, "sliding_window", None)
        and config._attn_implementation in ("sdpa", "eager")
        and not getattr(model, "_is_stateful", False)
        and not config.is_encoder_decoder
        and settings.repetition_penalty == 1.0
    )


class SlotCache:
    """Keys and values of all slots, as a transformers model asks for them.

    Relies on a model calling ``update(keys, values, layer)`` once per layer, and on a mask of four
    dimensions being taken as it is.
    """

    def __init__(self) -> None:
        """Start empty; shapes come with the first states."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._slots = torch.zeros(0, dtype=torch.long)
        self._read: slice | torch.Tensor = slice(0)
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._width = 0
        self.num_slots = self.capacity = 0
        self.is_compileable = False

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Make room; what is stored stays."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        self.num_slots = max(num_slots, self.num_slots)
        self.capacity = max(-(-capacity // _GROWTH) * _GROWTH, self.capacity)
        for layer, stored in self._layers.items():
            self._layers[layer] = (self._grown(stored[0]), self._grown(stored[1]))

    def aim(self, slots: Sequence[int], positions: torch.Tensor, width: int) -> None:
        """Say where the next tokens go: slots (B,), positions (B, T); read up to `width`."""
        self._slots = torch.tensor(slots, device=positions.device)
        # The first slots, all of them: nothing need be copied to be read.
        is_first = list(slots) == list(range(len(slots)))
        self._read = slice(len(slots)) if is_first else self._slots
        self._positions, self._width = positions, width

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, H, T, D) and return what the slots hold, (B, H, width, D)."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(keys), self._empty(values))
        rows = self._slots[:, None]  # (B, 1)
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[rows, :, self._positions] = new.transpose(1, 2)  # (B, T, H, D)
        found = tuple(s[self._read, :, : self._width] for s in self._layers[layer])
        return found[0], found[1]

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Give slots the first `length` tokens of another."""
        for stored in self._layers.values():
            for tensor in stored:
                tensor[list(targets), :, :length] = tensor[source, :, :length]

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: positions are always given."""
        return 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = like.shape
        return like.new_zeros(self.num_slots, heads, self.capacity, size)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = old.new_zeros(self.num_slots, old.size(1), self.capacity, old.size(3))
        new[: old.size(0), :, : old.size(2)] = old
        return new


@dataclass(slots=True)
class _Turn:
    """A state in a slot, and what was sampled after it so far."""

    slot: int
    prompt: list[int]
    uniforms: np.ndarray[Any, np.dtype[np.float64]] | None
    num_stored: int
    """Tokens of the prompt whose keys and values the slot holds."""
    is_over: Callable[[Sequence[int]], bool] | None = None
    """Says whether the turn ends with what was sampled so far, for who asked."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_unread(self) -> int:
        """Tokens to read before the last one, which gives the first new token."""
        return len(self.prompt) - 1 - self.num_stored


class ModelStream(GenerationStream):
    """Generation on a model that is lent for one rollout; its weights stay as they are."""

    def __init__(
        self, lend_model: LendModel, prompt: Prompt, finish: Finish, settings: SamplingSettings
    ) -> None:
        """Borrow the model.

        Args:
            lend_model: Lends the model, in the state in which it generates.
            prompt: Turns a request into tokens; None where they do not fit.
            finish: Turns tokens, and what was sampled after them, into an action.
            settings: How tokens are drawn.
        """
        super().__init__()
        self._loan = ExitStack()
        self._model = self._loan.enter_context(lend_model())
        self._prompt, self._finish, self._settings = prompt, finish, settings

    def close(self) -> None:
        """Give the model back."""
        self._loan.close()


class SlotStream(ModelStream):
    """A batch that episodes join and leave token by token; at most `max_slots` at once."""

    def __init__(self, *args: Any, max_slots: int) -> None:
        """Serve one rollout; `args` as in `ModelStream`."""
        super().__init__(*args)
        self._max_slots = max_slots
        self._cache = SlotCache()
        self._free: list[int] = []
        self._stored: dict[int, tuple[int, list[int]]] = {}  # by episode: slot, tokens in it
        self._reading: dict[int, _Turn] = {}
        self._writing: dict[int, _Turn] = {}
        self._resting: dict[int, None] = {}  # episodes whose slots others may have, oldest first

    @property
    def has_requests(self) -> bool:
        """Whether actions are wanted."""
        return bool(self._waiting or self._reading or self._writing)

    def add(self, key: int, request: GenerationRequest) -> None:
        """Ask for an action of episode `key`, which needs its slot again if it still has it."""
        super().add(key, request)
        self._resting.pop(key, None)

    def drop(self, key: int) -> None:
        """Free the slot of episode `key`."""
        for turns in (self._waiting, self._reading, self._writing, self._resting):
            turns.pop(key, None)
        if key in self._stored:
            self._free.append(self._stored.pop(key)[0])

    def rest(self, key: int) -> None:
        """Let an episode that waits have the slot of `key` if there is no other."""
        if key in self._stored:
            self._resting[key] = None

    def close(self) -> None:
        """Give the model back and free the memory."""
        super().close()
        self._cache = SlotCache()

    @torch.no_grad()
    def advance(self) -> list[StreamedResult]:
        """Seat who waits, read new states, and write one token for everybody else."""
        ready = self._seat()
        enough = _PREFILL_SHARE * (len(self._reading) + len(self._writing))
        if self._reading and (not self._writing or len(self._reading) >= enough):
            self._read()
        if self._writing:
            self._write()
        return ready + self._finished()

    def _seat(self) -> list[StreamedResult]:
        """Give slots to those who wait; return those whose state does not fit."""
        ready: list[StreamedResult] = []
        for key, request in list(self._waiting.items()):
            if key not in self._stored and len(self._stored) >= self._max_slots:
                if not self._resting:
                    continue
                self.drop(next(iter(self._resting)))
            del self._waiting[key]
            prompt = self._prompt(request)
            if prompt is None:
                ready.append((key, self._finish([], None)))
                continue
            slot, tokens = self._stored.get(key) or (None, [])
            if slot is None:
                slot = self._free.pop() if self._free else len(self._stored)
            uniforms = None
            if self._settings.temperature > 0:
                uniforms = request.rng.random(self._settings.max_new_tokens)
            known = min(_common_prefix(tokens, prompt), len(prompt) - 1)
            self._stored[key] = (slot, prompt)
            self._reading[key] = _Turn(slot, prompt, uniforms, known, request.is_over)
        return ready

    def _read(self) -> None:
        """Store keys and values of new states; equal first states are read once."""
        twins: dict[tuple[int, ...], list[_Turn]] = {}
        unread: list[_Turn] = []
        for turn in self._reading.values():
            if turn.num_unread > 0 and turn.num_stored == 0:
                twins.setdefault(tuple(turn.prompt), []).append(turn)
            elif turn.num_unread > 0:
                unread.append(turn)
        unread += [group[0] for group in twins.values()]
        longest = max(len(turn.prompt) for turn in self._reading.values())
        num_slots = max(slot for slot, _ in self._stored.values()) + 1
        self._cache.reserve(num_slots, longest + self._settings.max_new_tokens + 1)
        for batch in pack(
            [0] * len(unread),
            [turn.num_unread for turn in unread],
            max_rows=len(unread),
            max_tokens=_READ_TOKENS,
        ):
            turns = [unread[i] for i in batch]
            starts = [turn.num_stored for turn in turns]
            tokens = [turn.prompt[turn.num_stored : -1] for turn in turns]
            self._forward([turn.slot for turn in turns], starts, tokens)
        for first, *others in twins.values():
            if others:
                length = len(first.prompt) - 1
                self._cache.copy(first.slot, [turn.slot for turn in others], length)
        self._writing |= self._reading
        self._reading = {}

    def _write(self) -> None:
        """Draw one more token for everybody."""
        turns = sorted(self._writing.values(), key=lambda turn: turn.slot)
        slots = [turn.slot for turn in turns]
        starts = dict.fromkeys(slots, 0)
        # Slots in between that rest go along without a token: that costs less than a copy of all
        # that the others hold, unless those that rest are many.
        if slots[-1] < _SPAN * len(slots):
            starts = dict.fromkeys(range(slots[-1] + 1), 0)
        tokens: dict[int, list[int]] = {slot: [] for slot in starts}
        for turn in turns:
            tokens[turn.slot] = [turn.token_ids[-1] if turn.token_ids else turn.prompt[-1]]
            starts[turn.slot] = len(turn.prompt) - 1 + len(turn.token_ids)
        logits = self._forward(list(starts), list(starts.values()), list(tokens.values()))
        if len(starts) > len(slots):
            logits = logits[slots]
        scores = logits[:, -1].float()  # (B, V)
        for warper in self._settings.warpers():
            scores = warper(None, scores)
        points = None
        if self._settings.temperature > 0:
            numbers = [t.uniforms[len(t.token_ids)] for t in turns if t.uniforms is not None]
            points = torch.tensor(numbers, dtype=torch.float64, device=scores.device)
        drawn, logprobs = draw(scores, points)
        for turn, token, logprob in zip(turns, drawn.tolist(), logprobs.tolist(), strict=True):
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)

    def _forward(
        self, slots: list[int], starts: list[int], tokens: list[list[int]]
    ) -> torch.Tensor:
        """Run tokens that stand at `starts` in their slots; return logits (B, 1, V)."""
        device, dtype = self._model.device, self._model.dtype
        lengths = [len(ids) for ids in tokens]
        longest = max(lengths)
        pad, trash = self._settings.pad_token_id, self._cache.capacity - 1
        input_ids = [[*ids, *[pad] * (longest - len(ids))] for ids in tokens]
        positions = torch.tensor(  # (B, T); padding goes where no token ever stands
            [
                [*range(start, start + length), *[trash] * (longest - length)]
                for start, length in zip(starts, lengths, strict=True)
            ],
            device=device,
        )
        width = max(start + length for start, length in zip(starts, lengths, strict=True))
        self._cache.aim(slots, positions, width)
        is_hidden = torch.arange(width, device=device) > positions[:, None, :, None]
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=device)  # (B, 1, T, width)
        mask.masked_fill_(is_hidden, torch.finfo(dtype).min)
        logits: torch.Tensor = self._model(
            input_ids=torch.tensor(input_ids, device=device),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **without_router_loss(self._model),
        ).logits
        return logits

    def _finished(self) -> list[StreamedResult]:
        """Take out the turns that have ended; their slots keep what was said."""
        ready: list[StreamedResult] = []
        for key, turn in list(self._writing.items()):
            is_ended = turn.token_ids[-1] in self._settings.eos_token_ids or (
                turn.is_over is not None and turn.is_over(turn.token_ids)
            )
            if not is_ended and len(turn.token_ids) < self._settings.max_new_tokens:
                continue
            del self._writing[key]
            # The last token was drawn but has not gone through the model yet.
            self._stored[key] = (turn.slot, [*turn.prompt, *turn.token_ids[:-1]])
            logprobs = np.array(turn.logprobs, np.float32)
            completion = Completion(token_ids=turn.token_ids, logprobs=logprobs)
            ready.append((key, self._finish(turn.prompt, completion)))
        return ready


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
