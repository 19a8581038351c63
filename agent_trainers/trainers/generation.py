"""Sampling with the trained model: vLLM or transformers.

TRL starts vLLM and sends it the weights; turns join and leave its batch one by one. Only where an
engine belongs to several processes (tensor parallelism) they generate in waves, by TRL's method.
transformers generates in slots if model and settings allow it, else batch by batch.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import numpy as np
import torch
from trl.models import unwrap_model_for_generation

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.probe import vocabulary_size, without_dropout
from agent_trainers.policies.engines import EnginePolicy, VLLMServerPolicy
from agent_trainers.policies.guided import Guide, Guides
from agent_trainers.policies.local import TokenPolicy, context_length, has_slots_for
from agent_trainers.policies.policy import Schemas, VersionedPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample

ModelContext = Callable[[], AbstractContextManager[Any]]
"""Opens the context in which a model generates."""
_MAX_CALLS: Final = 256
"""Concurrent calls of a process to a server."""


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
        size, ends = vocabulary_size(self.model), self.settings.eos_token_ids
        self._guides = Guides(self.tokenizer, size, ends)
        self.ahead: VersionedPolicy | None = None
        """The policy of rollouts that run ahead of the optimiser, if they do."""
        self._copy: Any = None
        self._autocast: Any = None
        self._in_waves = (
            args.use_vllm and args.vllm_mode == "colocate" and (args.vllm_tensor_parallel_size > 1)
        )

    @property
    def is_collective(self) -> bool:
        """Whether all processes generate together."""
        return bool(self._in_waves if self._args.use_vllm else self.is_sharded)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Give vLLM the current weights, for the rollouts of a batch; collective."""
        trainer, args = self._trainer, self._args
        if not args.use_vllm or self._in_waves:
            yield
            return
        vllm = trainer.vllm_generation
        sleeps = args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
        if self.ahead is None:
            self._load_vllm(is_lost=sleeps and vllm._llm_weights_sleeping)
        else:
            self.publish()  # turns of rollouts that run ahead are under way
        if sleeps:
            vllm.llm.wake_up(tags=["kv_cache"])
        try:
            yield
        finally:
            if sleeps:
                vllm.llm.sleep(level=2)
                vllm._llm_weights_sleeping = True

    def _load_vllm(self, *, is_lost: bool = False) -> None:
        trainer, step = self._trainer, self._trainer.state.global_step
        if step != trainer._last_loaded_step or is_lost:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = step
            trainer.accelerator.wait_for_everyone()  # others may share the server

    @torch.no_grad()
    def publish(self) -> None:
        """Give the current weights to rollouts that run ahead; collective with vLLM."""
        assert self.ahead is not None
        with self.ahead.update(self._trainer.state.global_step):
            if self._copy is None:
                with self._paused_server():
                    self._load_vllm()
                return
            for copied, weight in zip(
                self._copy.parameters(), self.model.parameters(), strict=True
            ):
                if copied is not weight:
                    copied.copy_(weight)

    @contextmanager
    def _paused_server(self) -> Iterator[None]:
        """Pause vLLM's server, which cannot load weights while it processes requests.

        TRL's asynchronous trainer does the same.
        """
        if not self._trainer.accelerator.is_main_process:  # which sends the weights, too
            yield
            return
        client = self._trainer.vllm_generation.vllm_client
        client._post(f"{client.base_url}/pause", params={"mode": "keep"})
        try:
            yield
        finally:
            client._post(f"{client.base_url}/resume")

    def make_ahead_policy(self, tools: Schemas) -> VersionedPolicy:
        """Make the policy of rollouts in another thread, with a copy of the trained weights.

        Raises:
            ConfigurationError: If generation needs the trainer or all processes.
        """
        args = self._args
        if self.is_collective or (args.use_vllm and args.vllm_mode == "colocate"):
            raise ConfigurationError(
                "rollout='async' generates while the model is trained, which sharded models (FSDP, "
                "DeepSpeed) and vllm_mode='colocate' cannot. Use vllm_mode='server', or "
                "rollout='sync'."
            )
        if not args.use_vllm:
            frozen = {id(p): p for p in self.model.parameters() if not p.requires_grad}
            self._copy = copy.deepcopy(self.model, frozen).eval().requires_grad_(False)
            for module in self._copy.modules():  # TRL's replacements call the original model
                vars(module).pop("forward", None)
            # Other threads cannot use Accelerate's: its global state is the newest trainer's.
            device = self._trainer.accelerator.device.type
            with self._trainer.accelerator.autocast():
                self._autocast = functools.partial(
                    torch.autocast,
                    device,
                    dtype=torch.get_autocast_dtype(device),
                    enabled=torch.is_autocast_enabled(device),
                )
        self.ahead = VersionedPolicy(self.make_policy(tools, self._copy_context))
        return self.ahead

    def make_policy(self, tools: Schemas, context: ModelContext | None = None) -> TokenPolicy:
        """Make the policy of rollouts; `tools` are those that the chat template describes.

        It generates with the model of `context`, by default the trained one.
        """
        args, context = self._args, context or self._model_context
        renderer = ChatRenderer(self.tokenizer, args.chat_template_kwargs or {})
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
        limit = min(max_prompt_tokens, args.max_prompt_length or max_prompt_tokens)
        if args.use_vllm and not self._in_waves:
            return self._make_vllm_policy(renderer, limit)
        with self._trainer.accelerator.autocast():  # flash attention needs it
            has_slots = not self.is_collective and has_slots_for(self.model, self.settings)
        return TokenPolicy(
            renderer,
            functools.partial(self._complete, context=context),
            self.settings,
            max_prompt_tokens=limit,
            slot_model=context if has_slots else None,
            guides=None if self._in_waves else self._guides,  # TRL knows one form for all prompts
        )

    def _make_vllm_policy(self, renderer: ChatRenderer, max_prompt_tokens: int) -> TokenPolicy:
        args = self._args
        if args.vllm_mode == "colocate":
            engine = self._trainer.vllm_generation.llm.llm_engine
            return EnginePolicy(
                renderer, engine, self.settings,
                max_prompt_tokens=max_prompt_tokens, guides=self._guides,
            )  # fmt: skip
        address = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        return VLLMServerPolicy(
            args.vllm_server_base_url or address, renderer, self.settings,
            max_prompt_tokens=max_prompt_tokens, max_concurrency=_MAX_CALLS,
        )  # fmt: skip

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

    @contextmanager
    def _copy_context(self) -> Iterator[Any]:
        with self._autocast():
            yield self._copy

    def _complete(
        self,
        prompts: list[list[int]],
        rngs: list[np.random.Generator],
        guides: Sequence[Guide | None] = (),
        context: ModelContext | None = None,
    ) -> list[Completion]:
        """Sample one completion per prompt with TRL's backend."""
        if self._in_waves:
            return self._complete_together(prompts)
        if not prompts and self.is_sharded:
            # Generation is collective, so a process without episodes takes part, too.
            unused = self._complete([[self.settings.pad_token_id]], [np.random.default_rng(0)])
            return unused[:0]
        with (context or self._model_context)() as model:
            return sample(model, prompts, rngs, self.settings, guides)

    def _complete_together(self, prompts: list[list[int]]) -> list[Completion]:
        """Sample one completion per prompt of each process with the engine of all.

        TRL assumes that all processes have the same number of prompts. Ours have as many as
        episodes left, so they exchange prompts for equal shares first, and the completions
        afterwards.
        """
        processes = self._processes
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
        start = processes.num_before(len(prompts))
        own: list[Completion] = processes.all_gather_objects(completions)[start:]
        return own[: len(prompts)]


def _equal_share(items: list[Any], num_shares: int, index: int) -> list[Any]:
    """Return a share of `items`; the first item fills up the last shares."""
    size = -(-len(items) // num_shares)
    filled = [*items, *items[:1] * (size * num_shares - len(items))]
    return filled[index * size : (index + 1) * size]
