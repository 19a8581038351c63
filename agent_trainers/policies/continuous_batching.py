"""Generation with transformers' own continuous batching: paged attention, in a thread of its own.

It draws from torch's global generator, so what an episode samples depends on what else is under
way: a run cannot be repeated bit by bit, unlike with slots.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import numpy as np
from transformers import ContinuousBatchingConfig, GenerationConfig

from agent_trainers.policies.generation import Generation, GenerationRequest
from agent_trainers.policies.sampling import Completion, SamplingSettings
from agent_trainers.policies.slots import Finish, LendModel, Prompt
from agent_trainers.policies.streams import StreamedResult

_POLL_SECONDS: Final = 0.01


class ContinuousBatchingStream:
    """Hands states to a `ContinuousBatchingManager` and takes actions from it."""

    gathers = False

    def __init__(
        self,
        lend_model: LendModel,
        prompt: Prompt,
        finish: Finish,
        settings: SamplingSettings,
        config: ContinuousBatchingConfig,
    ) -> None:
        """Start the manager for one rollout; the weights stay as they are meanwhile.

        Args:
            lend_model: Lends the model, in the state in which it generates.
            prompt: Turns a request into tokens; None where they do not fit.
            finish: Turns tokens, and what was sampled after them, into an action.
            settings: How tokens are drawn.
            config: transformers' own settings: memory, size of the batch.
        """
        self._prompt, self._finish = prompt, finish
        self._loan = ExitStack()
        model: Any = self._loan.enter_context(lend_model())
        self._loan.callback(model.train, model.training)  # the manager sets eval mode
        self._manager = model.init_continuous_batching(
            generation_config=_generation_config(settings),
            continuous_batching_config=replace(config, return_logprobs=True),
        )
        self._manager.start()
        self._loan.callback(self._manager.stop, block=True)
        self._prompts: dict[int, list[int]] = {}
        self._too_long: list[int] = []

    @property
    def has_requests(self) -> bool:
        """Whether actions are wanted."""
        return bool(self._prompts or self._too_long)

    def add(self, key: int, request: GenerationRequest) -> None:
        """Ask for an action of episode `key`."""
        if (prompt := self._prompt(request)) is None:
            self._too_long.append(key)
            return
        self._prompts[key] = prompt
        self._manager.add_request(prompt, request_id=str(key))

    def advance(self) -> list[StreamedResult]:
        """Return what has ended, and wait a moment for it."""
        ready: list[StreamedResult] = [(key, self._finish([], None)) for key in self._too_long]
        self._too_long.clear()
        output = self._manager.get_result(timeout=_POLL_SECONDS) if self._prompts else None
        while output is not None:
            if (key := int(output.request_id)) in self._prompts:
                ready.append((key, self._generation(self._prompts.pop(key), output)))
            output = self._manager.get_result(timeout=0.001) if self._prompts else None
        if self._prompts and not self._manager.is_running():
            raise RuntimeError("transformers' continuous batching has stopped; see its log above.")
        return ready

    def drop(self, key: int) -> None:
        """Forget what episode `key` asked for."""
        if self._prompts.pop(key, None) is not None:
            self._manager.cancel_request(str(key))

    def close(self) -> None:
        """Stop the manager and give the model back."""
        self._loan.close()

    def _generation(self, prompt: list[int], output: Any) -> Generation | BaseException:
        if output.error is not None:
            return RuntimeError(f"transformers' continuous batching: {output.error}")
        token_ids = list(output.generated_tokens)
        logprobs = np.array(output.logprobs[: len(token_ids)], np.float32)
        return self._finish(prompt, Completion(token_ids=token_ids, logprobs=logprobs))


def _generation_config(settings: SamplingSettings) -> GenerationConfig:
    is_greedy = settings.temperature == 0.0
    sampling = {name: getattr(settings, name) for name in ("temperature", "top_k", "top_p")}
    return GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=not is_greedy,
        eos_token_id=list(settings.eos_token_ids),
        pad_token_id=settings.pad_token_id,
        **({} if is_greedy else sampling),
    )
