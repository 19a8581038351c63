"""Sampling with the trained model: vLLM through TRL, or transformers.

transformers generates in slots if model and settings allow it, else batch by batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from trl.models import unwrap_model_for_generation

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.distributed import ProcessGroup
from agent_trainers.policies.local import MakeStream, TokenPolicy, context_length
from agent_trainers.policies.policy import GenerationStream, Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample
from agent_trainers.policies.slots import Finish, Prompt, SlotStream, can_serve
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.scorer import without_dropout

TokensAndLogprobs = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]


@dataclass(kw_only=True)
class TrainerGenerator:
    """Generates for a trainer."""

    args: StepGRPOConfig
    processes: ProcessGroup
    model: Any
    """The unwrapped model."""
    tokenizer: Any
    eos_token_ids: Sequence[int]
    """Tokens that end a turn."""
    is_sharded: bool
    """Whether weights are gathered in each pass, so that all processes must pass together."""
    model_context: Callable[[], AbstractContextManager[Any]]
    """Context manager that yields the model for generation."""
    generate_with_vllm: Callable[[list[list[int]]], TokensAndLogprobs]
    """Samples one completion per prompt with vLLM."""
    settings: SamplingSettings = field(init=False)

    def __post_init__(self) -> None:
        """Derive the sampling settings."""
        args = self.args
        self.settings = SamplingSettings(
            max_new_tokens=args.max_completion_length,
            eos_token_ids=tuple(self.eos_token_ids),
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
        )

    @property
    def is_collective(self) -> bool:
        """Whether all processes generate together."""
        return bool(self.args.use_vllm or self.is_sharded)

    @property
    def max_drift(self) -> float | None:
        """Largest accepted drift of log-probabilities; None where it is not comparable."""
        return None if self.settings.is_truncated else self.args.max_logprob_drift

    def make_policy(self, tools: Schemas) -> TokenPolicy:
        """Make the policy of rollouts; `tools` are those that the chat template describes.

        Raises:
            ConfigurationError: If the model has no room, or does not see its tools.
        """
        renderer = ChatRenderer(self.tokenizer, self.args.chat_template_kwargs or {})
        if tools:
            renderer.check_tools(tools)
        limit = context_length(self.model)
        if self.args.use_vllm and self.args.vllm_max_model_length:
            limit = min(limit, self.args.vllm_max_model_length)
        max_prompt_tokens = limit - self.args.max_completion_length
        if max_prompt_tokens < 1:
            raise ConfigurationError(
                f"max_completion_length ({self.args.max_completion_length}) leaves no room "
                f"for a prompt in a context of {limit} tokens. Lower it, or use a model with a "
                "longer context."
            )
        if self.args.max_prompt_length is not None:
            max_prompt_tokens = min(max_prompt_tokens, self.args.max_prompt_length)
        return TokenPolicy(
            renderer,
            self._complete,
            eos_token_ids=self.eos_token_ids,
            max_prompt_tokens=max_prompt_tokens,
            make_stream=self._stream_maker(),
            settings=self.settings,
        )

    def _stream_maker(self) -> MakeStream | None:
        """Return the stream of transformers' generation; None to generate batch by batch."""
        if self.args.use_transformers_continuous_batching:
            raise ConfigurationError(
                "use_transformers_continuous_batching=True is not supported: rollouts batch "
                "continuously without it. Leave it out."
            )
        has_slots = not self.is_collective and can_serve(self.model, self.settings)
        return self._open_slots if has_slots else None

    def _open_slots(self, prompt: Prompt, finish: Finish) -> GenerationStream:
        return SlotStream(self.model_context, prompt, finish, self.settings, max_slots=2**31)

    def _complete(
        self, prompts: list[list[int]], rngs: list[np.random.Generator]
    ) -> list[Completion]:
        """Sample one completion per prompt with TRL's backend."""
        if not prompts and not self._shares_vllm:
            # Generation may be collective, so a process without episodes takes part, too.
            unused = self._complete([[self.settings.pad_token_id]], [np.random.default_rng(0)])
            return unused[:0]
        if self.args.use_vllm:
            return self._complete_with_vllm(prompts)
        with self.model_context() as model:
            return sample(model, prompts, rngs, self.settings)

    @property
    def _shares_vllm(self) -> bool:
        """Whether one engine samples for several processes."""
        is_shared = self.args.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1
        return bool(self.args.use_vllm and self.processes.size > 1 and is_shared)

    def _complete_with_vllm(self, prompts: list[list[int]]) -> list[Completion]:
        """Sample one completion per prompt.

        Where processes share an engine, TRL assumes that all have the same number of prompts. Ours
        have as many as episodes left, so they exchange prompts for equal shares first, and the
        completions afterwards.
        """
        processes = self.processes
        if self._shares_vllm:
            everything = processes.all_gather_objects(prompts)
            share = equal_shares(everything, processes.size)[processes.index]
        else:
            share = prompts
        if not share:  # no process has any
            return []
        token_ids, logprobs = self.generate_with_vllm(share)
        completions = [
            Completion(token_ids=list(ids), logprobs=np.array(values, np.float32))
            for ids, values in zip(token_ids, logprobs, strict=True)
        ]
        if self._shares_vllm:
            start = processes.num_before(len(prompts))
            completions = processes.all_gather_objects(completions)[start : start + len(prompts)]
        return completions


def make_generator(trainer: Any) -> TrainerGenerator:
    """Return the generator of a ``GRPOTrainer``."""

    @contextmanager
    def model_context() -> Iterator[Any]:
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
                generation_kwargs=trainer.generation_kwargs,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
            without_dropout(model),
            trainer.accelerator.autocast(),  # around all passes: weights are cast once for all
        ):
            yield model

    def generate_with_vllm(prompts: list[list[int]]) -> TokensAndLogprobs:
        token_ids, logprobs = trainer._generate_single_turn(prompts, None, {}, num_generations=1)
        return token_ids, logprobs

    return TrainerGenerator(
        args=trainer.args,
        processes=trainer.processes,
        model=trainer.accelerator.unwrap_model(trainer.model),
        tokenizer=trainer._tokenizer,
        eos_token_ids=trainer.eos_token_ids,
        is_sharded=trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
        model_context=model_context,
        generate_with_vllm=generate_with_vllm,
    )


def equal_shares(items: Sequence[Any], num_shares: int) -> list[list[Any]]:
    """Split `items` into shares of one size, repeating the first item to fill the last ones."""
    size = -(-len(items) // num_shares)
    filled = [*items, *[items[0] for _ in range(size * num_shares - len(items))]]
    return [filled[i * size : (i + 1) * size] for i in range(num_shares)]
