"""Sampling with the trained model: vLLM through TRL, or transformers.

transformers generates in slots if model and settings allow it, else batch by batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from trl.models import unwrap_model_for_generation

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.probe import vocabulary_size, without_dropout
from agent_trainers.policies.guided import Guide, Guides
from agent_trainers.policies.local import TokenPolicy, context_length, has_slots_for
from agent_trainers.policies.policy import Schemas
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample


class TrainerGenerator:
    """Generates for a ``GRPOTrainer``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._processes = trainer, trainer.processes
        self._args = args = trainer.args
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.tokenizer = trainer._tokenizer
        self.is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        """Whether weights are gathered in each pass, so that all processes must pass together."""
        self.settings = SamplingSettings(
            max_new_tokens=args.max_completion_length,
            eos_token_ids=tuple(trainer.eos_token_ids),
            pad_token_id=self.tokenizer.pad_token_id,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
        )
        self.max_drift = None if self.settings.is_truncated else args.max_logprob_drift
        """Largest accepted drift of log-probabilities; None where it is not comparable."""
        self._guides: Guides | None = None
        if not args.use_vllm:  # TRL's vLLM knows one form for all prompts
            size, ends = vocabulary_size(self.model), self.settings.eos_token_ids
            self._guides = Guides(self.tokenizer, size, ends)

    @property
    def is_collective(self) -> bool:
        """Whether all processes generate together."""
        return bool(self._args.use_vllm or self.is_sharded)

    def make_policy(self, tools: Schemas) -> TokenPolicy:
        """Make the policy of rollouts; `tools` are those that the chat template describes."""
        args = self._args
        renderer = ChatRenderer(self.tokenizer, args.chat_template_kwargs or {})
        if tools:
            renderer.check_tools(tools)
        limit = context_length(self.model)
        if args.use_vllm and args.vllm_max_model_length:
            limit = min(limit, args.vllm_max_model_length)
        max_prompt_tokens = limit - args.max_completion_length
        if max_prompt_tokens < 1:
            raise ConfigurationError(
                f"max_completion_length ({args.max_completion_length}) leaves no room for a prompt "
                f"in a context of {limit} tokens. Lower it, or use a model with a longer context."
            )
        with self._trainer.accelerator.autocast():  # flash attention needs it
            has_slots = not self.is_collective and has_slots_for(self.model, self.settings)
        return TokenPolicy(
            renderer,
            self._complete,
            self.settings,
            max_prompt_tokens=min(max_prompt_tokens, args.max_prompt_length or max_prompt_tokens),
            slot_model=self._model_context if has_slots else None,
            guides=self._guides,
        )

    @contextmanager
    def _model_context(self) -> Iterator[Any]:
        trainer = self._trainer
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

    def _complete(
        self,
        prompts: list[list[int]],
        rngs: list[np.random.Generator],
        guides: Sequence[Guide | None] = (),
    ) -> list[Completion]:
        """Sample one completion per prompt with TRL's backend."""
        if not prompts and not self._shares_vllm:
            # Generation may be collective, so a process without episodes takes part, too.
            unused = self._complete([[self.settings.pad_token_id]], [np.random.default_rng(0)])
            return unused[:0]
        if self._args.use_vllm:
            return self._complete_with_vllm(prompts)
        with self._model_context() as model:
            return sample(model, prompts, rngs, self.settings, guides)

    @property
    def _shares_vllm(self) -> bool:
        """Whether one engine samples for several processes."""
        args = self._args
        is_shared = args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1
        return bool(args.use_vllm and self._processes.size > 1 and is_shared)

    def _complete_with_vllm(self, prompts: list[list[int]]) -> list[Completion]:
        """Sample one completion per prompt.

        Where processes share an engine, TRL assumes that all have the same number of prompts. Ours
        have as many as episodes left, so they exchange prompts for equal shares first, and the
        completions afterwards.
        """
        processes, share = self._processes, prompts
        if self._shares_vllm:
            everything = processes.all_gather_objects(prompts)
            share = _equal_share(everything, processes.size, processes.index)
        if not share:  # no process has any
            return []
        generate = self._trainer._generate_single_turn
        token_ids, logprobs = generate(share, None, {}, num_generations=1)
        completions = [
            Completion(token_ids=list(ids), logprobs=np.array(values, np.float32))
            for ids, values in zip(token_ids, logprobs, strict=True)
        ]
        if self._shares_vllm:
            start = processes.num_before(len(prompts))
            completions = processes.all_gather_objects(completions)[start : start + len(prompts)]
        return completions


def _equal_share(items: list[Any], num_shares: int, index: int) -> list[Any]:
    """Return a share of `items`; the first item fills up the last shares."""
    size = -(-len(items) // num_shares)
    filled = [*items, *items[:1] * (size * num_shares - len(items))]
    return filled[index * size : (index + 1) * size]
