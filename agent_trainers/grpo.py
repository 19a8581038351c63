"""`StepGRPOTrainer`: GRPO on environment steps, on top of ``trl.GRPOTrainer``.

Three methods of TRL are overridden, all here; ``tests/agent_trainers/test_trl_contract.py`` watches
what they rely on. TRL keeps doing models, PEFT, vLLM, reference models, the loss, optimisation,
logging, checkpoints and callbacks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.tool_env import ENDLESS
from agent_envs.errors import ConfigurationError
from agent_trainers.advantages import estimate
from agent_trainers.batching import (
    Row,
    collate,
    make_rows,
    num_rows_per_rank,
    padding_row,
    trim,
)
from agent_trainers.episode_statistics import EpisodeSummary, summarise, trainer_metrics
from agent_trainers.grpo_config import StepGRPOConfig
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import Completion, SamplingSettings, sample
from agent_trainers.policies.transformers import TokenPolicy, context_length
from agent_trainers.rollout import EpisodeSpec, Rollout, TextEnv, template_tools
from agent_trainers.trajectory import Trajectory

MakeEnv = Callable[[], TextEnv]


class StepGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trains a language model by GRPO; each environment step is one transition."""

    args: StepGRPOConfig

    def __init__(
        self,
        model: Any,
        env: str | MakeEnv,
        args: StepGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        eval_env: str | MakeEnv | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        """Set up TRL's trainer, the environments and the rollout.

        Args:
            model: A causal language model, or its name or path.
            env: A Gymnasium id, or a function that makes an environment; called once for each
                episode that runs at the same time.
            args: Settings.
            train_dataset: Rows with a column ``task``, the index of a task of `env`. All tasks of
                `env` if not given; of an endless family, as many as ``max_steps`` needs.
            eval_dataset: The same for evaluation.
            eval_env: Where to evaluate, if not in `env`.
            processing_class: The tokenizer; the model's own if not given.
            callbacks: As in TRL.
            optimizers: As in TRL.
            quantization_config: As in TRL.
            peft_config: As in TRL.

        Raises:
            ConfigurationError: If something is not supported; the message names it.
        """
        args = args or StepGRPOConfig("step-grpo")
        make_env = _env_maker(env)
        probe = make_env()
        if train_dataset is None:
            train_dataset = _all_tasks(probe, args)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            _check_tasks(name, dataset)
        super().__init__(
            model=model,
            reward_funcs=[environment_reward],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        if self._is_vlm:
            raise ConfigurationError("Vision-language models are not supported; pass a tokenizer.")
        self.trajectories: dict[str, list[Trajectory]] = {"train": [], "eval": []}
        self.advantages: dict[str, list[Any]] = {"train": [], "eval": []}
        self._last_evaluated_step: int | None = None
        policy = self._make_policy(probe)
        self._rollouts = {"train": self._make_rollout(make_env, policy)}
        self._rollouts["eval"] = (
            self._make_rollout(_env_maker(eval_env), policy)
            if eval_env is not None
            else self._rollouts["train"]
        )
        probe.close()

    def forget_trajectories(self, mode: str) -> None:
        """Drop what `trajectories` and `advantages` hold.

        They hold this process's episodes: the last batch in ``"train"``, and in ``"eval"`` all of
        the evaluations at the last optimiser step that had any.
        """
        self.trajectories[mode], self.advantages[mode] = [], []
        if mode == "eval":
            self._last_evaluated_step = self.state.global_step

    # What is overridden

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the column `task`. Relies on: TRL's own are the columns that a row may have."""
        self._signature_columns = ["task"]

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Cut off the columns that are padding in the whole micro-batch.

        Relies on: TRL generates here, pads the generation batch as a whole, and splits it.
        """
        return trim(super()._prepare_inputs(generation_batch))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play the episodes of `inputs` and return their rows.

        Relies on: called with this process's share of a generation batch, one dict per episode,
        members of a group next to each other over all processes; the tensors it returns are
        shuffled and split along the first dimension, and read by ``_compute_loss``, which takes
        advantages of shape (B, T) and trains where ``completion_mask * tool_mask`` is 1.
        """
        mode = "train" if self.model.training else "eval"
        specs = self._episode_specs(inputs, mode)
        trajectories = self._rollouts[mode].collect(specs)
        # Groups may be spread over processes, so credit is assigned over the whole batch.
        episodes: list[EpisodeSummary] = gather_object([summarise(t) for t in trajectories])
        everything = estimate(
            self.args.advantage_estimator,
            episodes,
            gamma=self.args.gamma,
            scale=self.args.scale_rewards,
        )
        start = self._num_before(len(trajectories))
        advantages = everything[start : start + len(trajectories)]
        if mode == "train" or self._last_evaluated_step != self.state.global_step:
            self.forget_trajectories(mode)
        self.trajectories[mode] += trajectories
        self.advantages[mode] += advantages
        rows = [
            row
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
            if trajectory.is_scorable
            for row in make_rows(
                trajectory,
                advantage,
                merge=self.args.merge_steps,
                train_truncated=not self.args.mask_truncated_completions,
            )
        ]
        batch = self._to_batch(rows, mode)
        self._log_episodes(mode, trajectories, episodes, everything)
        return batch

    # Playing

    def _make_policy(self, probe: TextEnv) -> TokenPolicy:
        renderer = ChatRenderer(self._tokenizer, self.chat_template_kwargs)
        _, info = probe.reset(seed=0)
        if tools := template_tools(info):
            renderer.check_tools(tools)
        limit = context_length(self.model)
        if self.use_vllm and self.args.vllm_max_model_length:
            limit = min(limit, self.args.vllm_max_model_length)
        max_prompt_tokens = limit - self.max_completion_length
        if max_prompt_tokens < 1:
            raise ConfigurationError(
                f"max_completion_length ({self.max_completion_length}) leaves no room for a prompt "
                f"in a context of {limit} tokens. Lower it, or use a model with a longer context."
            )
        if self.args.max_prompt_length is not None:
            max_prompt_tokens = min(max_prompt_tokens, self.args.max_prompt_length)
        return TokenPolicy(
            renderer,
            self._complete,
            eos_token_ids=self.eos_token_ids,
            max_prompt_tokens=max_prompt_tokens,
        )

    def _make_rollout(self, make_env: MakeEnv, policy: TokenPolicy) -> Rollout:
        is_collective = self.use_vllm or self.is_fsdp_enabled or self.is_deepspeed_enabled
        return Rollout(
            make_env,
            policy,
            step_timeout=self.args.step_timeout,
            is_any_active=self._is_any_active if is_collective else bool,
        )

    def _is_any_active(self, is_active: bool) -> bool:
        return any(self._gather_int(int(is_active)))

    def _gather_int(self, value: int) -> list[int]:
        """Return the value of each process."""
        tensor = torch.tensor([value], device=self.accelerator.device)
        values: list[int] = self.accelerator.gather(tensor).tolist()
        return values

    def _num_before(self, count: int) -> int:
        """Return how many the processes before this one hold, if this one holds `count`."""
        return sum(self._gather_int(count)[: self.accelerator.process_index])

    def _episode_specs(self, inputs: Sequence[Mapping[str, Any]], mode: str) -> list[EpisodeSpec]:
        """Say what to play: one group per run of `num_generations` episodes over all processes.

        Seeds depend on the place in the run, not on the process, so any number of processes plays
        the same episodes, and a resumed run those that it would have played.
        """
        is_training = mode == "train"
        group_size = self.num_generations if is_training else self.num_generations_eval
        micro_step = self._step % self.args.gradient_accumulation_steps
        step = (self.state.global_step, micro_step) if is_training else (0, 0)
        specs = []
        for i, row in enumerate(inputs, start=self._num_before(len(inputs))):
            task = int(row["task"])
            group, member = divmod(i, group_size)
            # In training a task may come twice in a batch; in evaluation every task is new.
            place = (group if is_training else task, member)
            specs.append(
                EpisodeSpec(
                    task=task,
                    seed=_seed(self.args.seed, is_training, *step, task),
                    group_id=f"{mode}-{step[0]}-{step[1]}-{group}",
                    rng=np.random.default_rng([self.args.seed, is_training, *step, *place]),
                )
            )
        return specs

    def _complete(
        self, prompts: list[list[int]], rngs: list[np.random.Generator]
    ) -> list[Completion]:
        """Sample one completion per prompt with TRL's backend."""
        if not prompts:
            # Generation may be collective: a process without episodes keeps the others company.
            company = self._complete([[self._tokenizer.pad_token_id]], [np.random.default_rng(0)])
            return company[:0]
        if self.use_vllm:
            token_ids, logprobs = self._generate_single_turn(prompts, None, {}, num_generations=1)
            return [
                Completion(token_ids=list(ids), logprobs=np.array(values, np.float32))
                for ids, values in zip(token_ids, logprobs, strict=True)
            ]
        settings = SamplingSettings(
            max_new_tokens=self.max_completion_length,
            eos_token_ids=tuple(self.eos_token_ids),
            pad_token_id=self._tokenizer.pad_token_id,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
        )
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            return sample(model, prompts, rngs, settings)

    # Rows to tensors

    def _to_batch(self, rows: list[Row], mode: str) -> dict[str, Any]:
        """Pad this process's rows to the number all processes hold, and add log-probabilities."""
        num_splits = self.args.steps_per_generation if mode == "train" else 1
        num_rows = num_rows_per_rank(self._gather_int(len(rows)), num_splits)
        pad_token_id = self._tokenizer.pad_token_id
        rows = [*rows, *[padding_row(pad_token_id)] * (num_rows - len(rows))]
        batch: dict[str, Any] = {
            name: tensor.to(self.accelerator.device)
            for name, tensor in collate(rows, pad_token_id, self.pad_to_multiple_of).items()
        }
        num_trained = self.accelerator.gather(batch["tool_mask"].sum()).sum()
        batch["num_items_in_batch"] = num_trained
        with (
            torch.no_grad(),
            disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs),
        ):
            self._add_old_logprobs(batch, mode)
            if self.beta != 0.0:
                batch["ref_per_token_logps"] = self._reference_logprobs(batch, mode)
        return batch

    def _add_old_logprobs(self, batch: dict[str, Any], mode: str) -> None:
        """Add what TRL's loss needs where the policy that sampled is not the one that trains."""
        uses_correction = self.use_vllm and self.vllm_importance_sampling_correction
        generate_every = self.args.steps_per_generation * self.num_iterations
        if not uses_correction and self.args.gradient_accumulation_steps % generate_every == 0:
            return
        batch["old_per_token_logps"] = self._logprobs(self.model, batch, mode)
        if uses_correction:
            batch["importance_sampling_ratio"] = self._importance_ratio(batch)

    def _importance_ratio(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return training over sampling probability of each token, shape (B, T), as TRL does.

        1 where a token is not trained or vLLM gave no log-probability.
        """
        difference = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
        ratio = torch.exp(torch.nan_to_num(difference * batch["tool_mask"], nan=0.0))
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if self.vllm_importance_sampling_mode == "token_truncate":
            return ratio.clamp(min=low, max=high)
        is_outside = torch.zeros_like(ratio, dtype=torch.bool)
        if low is not None:
            is_outside |= ratio < low
        if high is not None:
            is_outside |= ratio > high
        return ratio.masked_fill(is_outside, 0.0)

    def _reference_logprobs(self, batch: Mapping[str, torch.Tensor], mode: str) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logprobs(self.ref_model, batch, mode)
        # TRL keeps no reference model beside an adapter: switched off (or, for an adapter that is
        # trained further, its copy "ref") the model is the reference.
        model = self.accelerator.unwrap_model(self.model)
        assert is_peft_model(model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logprobs(self.model, batch, mode)

    def _logprobs(self, model: Any, batch: Mapping[str, torch.Tensor], mode: str) -> torch.Tensor:
        """Return the log-probability of each completion token, shape (B, T)."""
        train_size, eval_size = (
            self.args.per_device_train_batch_size,
            self.args.per_device_eval_batch_size,
        )
        logprobs, _, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),  # (B, P + T)
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].size(1),
            batch_size=train_size if mode == "train" else eval_size,
        )
        assert isinstance(logprobs, torch.Tensor)
        return logprobs

    # Logging

    def _log_episodes(
        self,
        mode: str,
        trajectories: Sequence[Trajectory],
        episodes: Sequence[EpisodeSummary],
        advantages: Sequence[Any],
    ) -> None:
        """Put the statistics of the whole batch where TRL's `log` finds them."""
        for name, value in trainer_metrics(episodes, advantages).items():
            self._metrics[mode][name].append(value)
        if mode == "train":
            self.state.num_input_tokens_seen += sum(episode.num_tokens for episode in episodes)
        self._metrics[mode]["num_tokens"] = [self.state.num_input_tokens_seen]
        if not self.log_completions:
            return
        played = gather_object([_as_conversation(t) for t in trajectories])
        self._logs["prompt"].extend(prompt for prompt, _ in played)
        self._logs["completion"].extend(completion for _, completion in played)
        self._logs["advantages"].extend(float(np.mean(a)) if len(a) else 0.0 for a in advantages)
        for name in sorted({name for episode in episodes for name in episode.reward_terms}):
            values = [episode.reward_terms.get(name, 0.0) for episode in episodes]
            self._logs["rewards"][name].extend(values)


def environment_reward(**_: Any) -> list[float]:
    """Stand in the place where TRL wants a reward function; the environment owns the reward.

    Raises:
        RuntimeError: Always. TRL must not call it: `_generate_and_score_completions` is overridden.
    """
    raise RuntimeError("TRL asked for a reward although the environment gives it.")


def _env_maker(env: str | MakeEnv) -> MakeEnv:
    return functools.partial(gym.make, env) if isinstance(env, str) else env


def _all_tasks(env: TextEnv, args: StepGRPOConfig) -> Dataset:
    num_tasks = getattr(env.unwrapped, "num_tasks", None)
    if num_tasks is not None:
        return Dataset.from_dict({"task": list(range(num_tasks))})
    if args.max_steps <= 0:
        raise ConfigurationError(
            "The environment's tasks are endless: set max_steps, or pass a train_dataset with a "
            "column 'task'."
        )
    # One pass over the dataset lasts the whole run, so no task is seen twice.
    micro_steps = args.max_steps * args.gradient_accumulation_steps
    num_batches = -(-micro_steps // (args.steps_per_generation * args.num_iterations))
    num_needed = num_batches * args.generation_batch_size // args.num_generations
    tasks = np.random.default_rng(args.seed).integers(ENDLESS, size=num_needed)
    return Dataset.from_dict({"task": tasks.tolist()})


def _check_tasks(name: str, dataset: Any) -> None:
    if dataset is not None and "task" not in dataset.column_names:
        raise ConfigurationError(
            f"{name} needs a column 'task' with the index of a task of the environment (found: "
            f"{', '.join(dataset.column_names)}). Example: "
            "Dataset.from_dict({'task': list(range(100))})."
        )


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def _as_conversation(trajectory: Trajectory) -> tuple[list[Any], list[Any]]:
    """Return a trajectory as TRL's completion log wants it: prompt and completion messages."""
    if not trajectory.transitions:
        return [], []
    first, last = trajectory.transitions[0], trajectory.transitions[-1]
    later = last.messages[len(first.messages) :]
    return list(first.messages), [*later, {"role": "assistant", "content": last.action}]
