"""Generation with transformers' own continuous batching: paged attention, in a thread of its own.

It draws from torch's global generator, so what an episode samples depends on what else is under
way: a run cannot be repeated bit by bit, unlike with slots.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from transformers import ContinuousBatchingConfig

from agent_trainers.policies.generation import Generation
from agent_trainers.policies.sampling import Completion
from agent_trainers.policies.slots import ModelStream
from agent_trainers.policies.streams import POLL_SECONDS, StreamedResult


class ContinuousBatchingStream(ModelStream):
    """Hands states to a `ContinuousBatchingManager` and takes actions from it."""

    def __init__(self, *args: Any, config: ContinuousBatchingConfig) -> None:
        """Start the manager; `args` as in `ModelStream`, `config` is transformers' own."""
        super().__init__(*args)
        self._context.callback(
            self._model.train, self._model.training
        )  # the manager sets eval mode
        names = ("temperature", "top_k", "top_p") if self._settings.temperature else ()
        sampling = {name: getattr(self._settings, name) for name in names}
        self._manager = self._model.init_continuous_batching(
            generation_config=self._settings.generation_config(do_sample=bool(names), **sampling),
            continuous_batching_config=replace(config, return_logprobs=True),
        )
        self._manager.start()
        self._context.callback(self._manager.stop, block=True)
        self._prompts: dict[int, list[int]] = {}  # of what is under way

    @property
    def has_requests(self) -> bool:
        """Whether actions are wanted."""
        return bool(self._waiting or self._prompts)

    def advance(self) -> list[StreamedResult]:
        """Hand in what waits; return what has ended, and wait a moment for it."""
        ready: list[StreamedResult] = []
        for key, request in self._waiting.items():
            if (prompt := self._prompt(request)) is None:
                ready.append((key, self._finish([], None)))
            else:
                self._prompts[key] = prompt
                self._manager.add_request(prompt, request_id=str(key))
        self._waiting.clear()
        output = self._manager.get_result(timeout=POLL_SECONDS) if self._prompts else None
        while output is not None:
            if (key := int(output.request_id)) in self._prompts:
                ready.append((key, self._generation(self._prompts.pop(key), output)))
            output = self._manager.get_result(timeout=0.001) if self._prompts else None
        if self._prompts and not self._manager.is_running():
            raise RuntimeError("transformers' continuous batching has stopped; see its log above.")
        return ready

    def drop(self, key: int) -> None:
        """Forget what episode `key` asked for."""
        super().drop(key)
        if self._prompts.pop(key, None) is not None:
            self._manager.cancel_request(str(key))

    def _generation(self, prompt: list[int], output: Any) -> Generation | BaseException:
        if output.error is not None:
            return RuntimeError(f"transformers' continuous batching: {output.error}")
        token_ids = list(output.generated_tokens)
        logprobs = np.array(output.logprobs[: len(token_ids)], np.float32)
        return self._finish(prompt, Completion(token_ids=token_ids, logprobs=logprobs))
