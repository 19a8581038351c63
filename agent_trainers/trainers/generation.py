"""Sampling with the model that is being trained, by whatever the trainer generates with.

vLLM, colocated or as a server, through TRL; transformers in slots, in waves, or with its own
continuous batching.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from trl.models import unwrap_model_for_generation

from agent_envs.errors import ConfigurationError
from agent_trainers.policies.continuous_batching import ContinuousBatchingStream
from agent_trainers.policies.local import MakeStream, TokenPolicy, context_length
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample
from agent_trainers.policies.slots import Finish, Prompt, SlotStream, can_serve
from agent_trainers.policies.streams import GenerationStream
from agent_trainers.rollout.episode import TextEnv, template_tools


class TrainerSampler:
    """Samples for a `StepGRPOTrainer`."""

    def __init__(self, trainer: Any) -> None:
        """Sample with the model and the settings of `trainer`."""
        self._trainer = trainer

    @property
    def is_sharded(self) -> bool:
        """Whether weights are gathered in each pass, so that processes must pass in step."""
        return bool(self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled)

    @property
    def is_collective(self) -> bool:
        """Whether all processes generate together."""
        return bool(self._trainer.use_vllm or self.is_sharded)

    def make_policy(self, probe: TextEnv) -> TokenPolicy:
        """Make the policy that plays; `probe` says which tools there are.

        Raises:
            ConfigurationError: If the model has no room, or does not see its tools.
        """
        renderer = ChatRenderer(self._trainer._tokenizer, self._trainer.chat_template_kwargs)
        _, info = probe.reset(seed=0)
        if tools := template_tools(info):
            renderer.check_tools(tools)
        limit = context_length(self._trainer.model)
        if self._trainer.use_vllm and self._trainer.args.vllm_max_model_length:
            limit = min(limit, self._trainer.args.vllm_max_model_length)
        max_prompt_tokens = limit - self._trainer.max_completion_length
        if max_prompt_tokens < 1:
            raise ConfigurationError(
                f"max_completion_length ({self._trainer.max_completion_length}) leaves no room "
                f"for a prompt in a context of {limit} tokens. Lower it, or use a model with a "
                "longer context."
            )
        if self._trainer.args.max_prompt_length is not None:
            max_prompt_tokens = min(max_prompt_tokens, self._trainer.args.max_prompt_length)
        return TokenPolicy(
            renderer,
            self._complete,
            eos_token_ids=self._trainer.eos_token_ids,
            max_prompt_tokens=max_prompt_tokens,
            make_stream=self._stream_maker(),
        )

    def _stream_maker(self) -> MakeStream | None:
        """Choose how transformers generates; None for waves."""
        if not self._trainer.use_transformers_continuous_batching:
            return self._open_slots if self._has_slots() else None
        if self.is_collective or self.settings.min_p or self._trainer.repetition_penalty != 1.0:
            raise ConfigurationError(
                "use_transformers_continuous_batching=True does not go with vLLM, FSDP, DeepSpeed, "
                "min_p or a repetition penalty. Leave it out, or leave those out."
            )
        return self._open_continuous_batching

    def _open_continuous_batching(self, prompt: Prompt, finish: Finish) -> GenerationStream:
        backend = (self._lend_model, prompt, finish, self.settings)
        config = self._trainer.continuous_batching_config
        return ContinuousBatchingStream(*backend, config=config)

    def _has_slots(self) -> bool:
        wanted = self._trainer.args.transformers_generation
        if wanted == "waves":
            return False
        model = self._trainer.accelerator.unwrap_model(self._trainer.model)
        is_served = not self.is_collective and can_serve(model, self.settings)
        if wanted == "slots" and not is_served:
            raise ConfigurationError(
                "transformers_generation='slots' needs a model with full attention (sdpa or eager) "
                "and rotary positions, no repetition penalty, and neither vLLM nor sharded "
                "weights. Use 'auto' or 'waves'."
            )
        return is_served

    def _open_slots(self, prompt: Prompt, finish: Finish) -> GenerationStream:
        return SlotStream(self._lend_model, prompt, finish, self.settings, max_slots=2**31)

    def check_drift(self, drift: float) -> None:
        """Refuse to train on tokens that the trainer finds too likely or too unlikely.

        Args:
            drift: Mean difference of log-probabilities, in nats per token.

        Raises:
            ConfigurationError: If it is beyond `max_logprob_drift`.
        """
        limit = self._trainer.args.max_logprob_drift
        if limit is None or drift <= limit or self.settings.is_truncated:
            return
        raise ConfigurationError(
            f"The log-probabilities of the sampled tokens are off by {drift:.3g} nats per token "
            f"when they are computed anew (max_logprob_drift: {limit:g}). Policy and trainer do "
            "not see the same tokens or weights: compare the chat template, the tokenizer and the "
            "precision of both, and whether the server has the newest weights. To train "
            "nonetheless, raise max_logprob_drift."
        )

    def _complete(
        self, prompts: list[list[int]], rngs: list[np.random.Generator]
    ) -> list[Completion]:
        """Sample one completion per prompt with TRL's backend."""
        if not prompts and not self._shares_vllm:
            # Generation may be collective: a process without episodes keeps the others company.
            company = self._complete(
                [[self._trainer._tokenizer.pad_token_id]], [np.random.default_rng(0)]
            )
            return company[:0]
        if self._trainer.use_vllm:
            return self._complete_with_vllm(prompts)
        with self._lend_model() as model:
            return sample(model, prompts, rngs, self.settings)

    @property
    def settings(self) -> SamplingSettings:
        """How tokens are drawn."""
        return SamplingSettings(
            max_new_tokens=self._trainer.max_completion_length,
            eos_token_ids=tuple(self._trainer.eos_token_ids),
            pad_token_id=self._trainer._tokenizer.pad_token_id,
            temperature=self._trainer.temperature,
            top_p=self._trainer.top_p,
            top_k=self._trainer.top_k,
            min_p=self._trainer.min_p,
            repetition_penalty=self._trainer.repetition_penalty,
        )

    @contextmanager
    def _lend_model(self) -> Iterator[Any]:
        """Lend the model as TRL generates with it."""
        with (
            unwrap_model_for_generation(
                self._trainer.model_wrapped,
                self._trainer.accelerator,
                gather_deepspeed3_params=self._trainer.args.ds3_gather_for_generation,
                generation_kwargs=self._trainer.generation_kwargs,
                gradient_checkpointing_kwargs=self._trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            self._trainer._dist.summon_full_params(self._trainer.model_wrapped, recurse=False),
        ):
            yield model

    @property
    def _shares_vllm(self) -> bool:
        """Whether one engine samples for several processes."""
        is_shared = (
            self._trainer.vllm_mode == "server" or self._trainer.args.vllm_tensor_parallel_size > 1
        )
        return bool(
            self._trainer.use_vllm and self._trainer.accelerator.num_processes > 1 and is_shared
        )

    def _complete_with_vllm(self, prompts: list[list[int]]) -> list[Completion]:
        """Sample one completion per prompt.

        Where processes share an engine, TRL gives each the part of the answers that it would have
        if all brought as many prompts. Ours bring as many as they have episodes left, so they
        exchange them for equal shares first, and the answers back after.
        """
        if self._shares_vllm:
            everything = gather_object(prompts)
            shares = equal_shares(everything, self._trainer.accelerator.num_processes)
            share = shares[self._trainer.accelerator.process_index]
        else:
            share = prompts
        if not share:  # no process has any
            return []
        token_ids, logprobs = self._trainer._generate_single_turn(
            share, None, {}, num_generations=1
        )
        completions = [
            Completion(token_ids=list(ids), logprobs=np.array(values, np.float32))
            for ids, values in zip(token_ids, logprobs, strict=True)
        ]
        if self._shares_vllm:
            start = self._trainer.ranks.num_before(len(prompts))
            completions = gather_object(completions)[start : start + len(prompts)]
        return completions


def equal_shares(items: Sequence[Any], num_shares: int) -> list[list[Any]]:
    """Cut `items` into as many shares of one size; the first item fills the last ones up.

    Empty shares only where there are no items at all.
    """
    size = -(-len(items) // num_shares)
    filled = [*items, *[items[0] for _ in range(size * num_shares - len(items))]]
    return [filled[i * size : (i + 1) * size] for i in range(num_shares)]
