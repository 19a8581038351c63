"""Settings of the step-level trainers: TRL's, some of ours, and presets by algorithm."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from transformers.hf_argparser import HfArg
from trl import GRPOConfig

from agent_envs.core.command_line import check_range, json_object
from agent_envs.core.lookup import import_path, lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimator_options,
    needs_values,
)
from agent_trainers.algorithms.episodes import SCALES, check_scale
from agent_trainers.algorithms.losses import (
    IMPORTANCE_MODES,
    RATIO_LEVELS,
    find_policy_loss,
)
from agent_trainers.algorithms.reward_schedules import parse_schedules
from agent_trainers.batching.per_token import DENOMINATORS
from agent_trainers.tasks.samplers import parse_curriculum

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {"advantage_estimator": "grpo", "loss_denominator": "trajectory"},
    "grpo_step": {"advantage_estimator": "grpo_step"},
    "dr_grpo": {"advantage_estimator": "dr_grpo"},
    "dapo": {"advantage_estimator": "grpo", "epsilon_high": 0.28},
    "gspo": {
        "advantage_estimator": "grpo",
        "importance_sampling_level": "sequence",
        "loss_denominator": "trajectory",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "rloo": {"advantage_estimator": "rloo"},
    "reinforce++": {"advantage_estimator": "reinforce_pp"},
    "reinforce++-baseline": {"advantage_estimator": "reinforce_pp_baseline"},
    "gigpo": {"advantage_estimator": "gigpo"},
    "gagpo": {"advantage_estimator": "gagpo", "scale_rewards": "batch"},
    "max_rl": {"advantage_estimator": "max_rl"},
    "gdpo": {"advantage_estimator": "gdpo"},
    **{
        name: {"advantage_estimator": f"agent_trainers.experimental.branching:{name}"}
        for name in ("rtmc", "vine", "tree")
    },
    "ppo": {"advantage_estimator": "gae_token"},
    "step_ppo": {
        "advantage_estimator": "gae_step",
        "importance_sampling_level": "step",
        "loss_denominator": "step",
        "gamma": 0.99,
    },
    "turn_ppo": {
        "advantage_estimator": "gae_step",
        "importance_sampling_level": "product",
        "loss_denominator": "step",
        "gamma": 0.99,
        "lam": 0.9,
    },
    "bilevel_ppo": {"advantage_estimator": "gae_bilevel", "gamma": 0.99},
}
"""Settings that ``--algorithm`` sets; an explicit setting wins."""

# The loss must not change with row splitting, merging, padding, world size or micro-batching.
# Settings of TRL that would break that, or do nothing: option, allowed values, reason.
_MICRO_BATCH: Final = "it is taken of a micro-batch, with which the loss would change"
_REFUSALS: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("enable_jit_checkpoint", (False,), "agent-r1-train saves when it is stopped"),
    ("load_best_model_at_end", (False,), "compare checkpoints with agent-r1-eval"),
    ("off_policy_mask_threshold", (None,), "it averages over rows"),
    ("top_entropy_quantile", (1.0,), _MICRO_BATCH),
    ("entropy_coef", (0.0,), _MICRO_BATCH),
    ("router_aux_loss_coef", (None, 0.0), _MICRO_BATCH),
    ("pad_to_multiple_of", (None,), "rows are padded to the longest of their micro-batch"),
    ("log_completions", (False,), "the episodes of a run are on its pages"),
    ("use_adaptive_entropy", (False,), _MICRO_BATCH),
    ("cache_implementation", (None,), "rollouts have their own cache"),
    ("use_transformers_continuous_batching", (False,), "rollouts batch continuously without it"),
    ("generation_kwargs", (None,), "use temperature, top_p, top_k and min_p"),
    ("reward_weights", (None,), "pass rewards={name: weight} to the environment"),
    ("multi_objective_aggregation", ("sum_then_normalize",), "the environment sums its rewards"),
    ("vllm_structured_outputs_regex", (None,), "turns have the tool format of the environment"),
    ("max_tool_calling_iterations", (None,), "use gym.make(..., max_episode_steps=N)"),
)
_RANGES: Final[Mapping[str, tuple[str, ...]]] = {
    "in [0, 1]": (
        "gamma", "lam", "min_p", "lora_dropout", "ref_model_mixup_alpha", "label_smoothing_factor",
    ),
    "in (0, 1]": ("max_fault_share", "top_p", "vllm_gpu_memory_utilization"),
    "in [0, 1)": ("adam_beta1", "adam_beta2"),
    "at least 0": (
        "seed", "data_seed", "max_extra_groups", "max_staleness", "critic_warmup_steps", "beta",
        "epsilon", "epsilon_high", "weight_decay", "max_grad_norm", "top_k", "warmup_steps",
        "learning_rate",
        "max_logprob_drift", "vllm_importance_sampling_clip_min", "eval_delay",
        "neftune_noise_alpha", "dataloader_num_workers",
    ),
    "at least 1": (
        "per_device_train_batch_size", "per_device_eval_batch_size", "max_length",
        "gradient_accumulation_steps", "max_prompt_length", "max_tokens_per_micro_batch",
        "max_completion_length", "num_generations", "num_generations_eval", "num_iterations",
        "steps_per_generation", "generation_batch_size", "save_total_limit",
        "eval_accumulation_steps", "torch_empty_cache_steps", "ref_model_sync_steps",
        "vllm_tensor_parallel_size", "vllm_max_model_length", "dataloader_prefetch_factor",
        "ddp_timeout", "ddp_bucket_cap_mb", "vllm_server_port", "vllm_group_port",
    ),
    "-1, or at least 1": ("max_steps",),
    "more than 1": ("delta",),
    "positive": (
        "step_timeout", "episode_timeout", "temperature", "value_coef", "value_clip_range",
        "critic_learning_rate", "repetition_penalty", "adam_epsilon", "save_steps", "eval_steps",
        "logging_steps", "num_train_epochs", "vllm_importance_sampling_clip_max",
        "vllm_server_timeout",
    ),
}  # fmt: skip
"""Ranges of settings that transformers and TRL do not check."""


@dataclass
class StepGRPOConfig(GRPOConfig):  # type: ignore[misc] # TRL is untyped
    """Settings of `StepGRPOTrainer`, on top of ``trl.GRPOConfig``.

    ``max_completion_length`` is the length of one turn. ``loss_denominator`` selects the mean of
    the loss, always over the whole batch and all processes. ``importance_sampling_level`` is
    ``"token"``, ``"step"`` (mean of the step's log-ratios), ``"product"`` (their sum) or
    ``"sequence"`` (mean over the trajectory). ``advantage_estimator`` and ``loss_type`` may be
    functions; they are stored as import paths.
    """

    advantage_estimator: str = HfArg(
        default="grpo",
        help="Maps rewards to advantages: one of "
        + ", ".join(ADVANTAGE_ESTIMATORS)
        + ", or an import path, 'my_module:my_estimator'.",
    )
    loss_type: str = HfArg(
        default="dapo",
        help="Policy loss of a token: 'dapo' (clipped policy gradient), 'cispo', or an import "
        "path, 'my_module:my_loss', of a function like policy_loss in "
        "agent_trainers.algorithms.losses.",
    )
    gamma: float = HfArg(
        default=1.0, help="Discount in [0, 1], per step (one model turn); per token in gae_token."
    )
    lam: float | None = HfArg(
        default=None, help="Lambda of generalised advantages, in [0, 1]. Default: 1."
    )
    estimator_kwargs: str | None = HfArg(
        default=None,
        help="Further options of the estimator as JSON: token_gamma and token_lam of gae_bilevel, "
        "step_advantage_weight of gigpo, weights of gdpo: '{\"token_lam\": 0.95}'.",
    )
    loss_denominator: str = HfArg(
        default="token",
        help="The loss is a mean over every trained 'token' of the batch, 'step', or 'trajectory'.",
    )
    loss_mask: bool = HfArg(
        default=True,
        help="Train sampled tokens only. Off, observations get the advantage of the action before "
        "them, as in the ablation of Agent-R1.",
    )
    train_summaries: bool = HfArg(
        default=True,
        help="Train the summaries that the policy writes with context='policy'. Off, they are "
        "sampled but masked, as an ablation.",
    )
    advantage_mask: bool = HfArg(
        default=True,
        help="gae_token: compute advantages over sampled tokens only, unlike Agent-R1's ablation.",
    )
    use_bias_correction_kl: bool = HfArg(
        default=False, help="Multiply the divergence by each token's importance ratio, at most 3."
    )
    reward_schedules: str | None = HfArg(
        default=None,
        help='Factors of reward terms over the run, as JSON: \'{"new_gold_passage": '
        '{"kind": "linear", "start": 1, "end": 0}}\'. Kinds: constant, linear, cosine, adaptive '
        "(start until 'metric' reaches 'target', then end).",
    )
    curriculum: str | None = HfArg(
        default=None,
        help="Selects tasks by the success so far: 'levels' goes through the run's environments, "
        'easy to hard; with settings \'{"kind": "levels", "target": 0.8}\'.',
    )
    max_extra_groups: int = HfArg(
        default=0,
        help="Dynamic sampling (DAPO, arXiv 2503.14476): how many groups without variance in their "
        "returns are replaced by groups of other tasks, per batch.",
    )
    extensions: str | None = HfArg(
        default=None,
        help="Import path of an extension of the trainer, or several as JSON with their arguments: "
        '\'{"my_module:MyExtension": {"weight": 0.5}}\'.',
    )
    max_tokens_per_micro_batch: int | None = HfArg(
        default=None,
        help="Tokens of a forward pass, padding included, so that memory stays flat; the gradient "
        "is the same. Default: per_device_train_batch_size rows, however long.",
    )
    max_prompt_length: int | None = HfArg(
        default=None,
        help="Longest state in tokens. Default: the model's context less max_completion_length.",
    )
    step_timeout: float = HfArg(
        default=300.0, help="Seconds that a step may take before its episode is left out."
    )
    episode_timeout: float | None = HfArg(
        default=None,
        help="Seconds that an episode may take before it is left out; no limit by default.",
    )
    max_fault_share: float | None = HfArg(
        default=0.5,
        help="Share of a batch's episodes that may fail for infrastructure reasons; more in three "
        "consecutive batches, or all of one, end the run. None only counts them.",
    )
    rollout: str = HfArg(
        default="sync",
        help="'sync' rolls out, then trains; 'async' rolls out the next batches in the background "
        "while the optimiser trains and slow tools run.",
    )
    max_staleness: int | None = HfArg(
        default=None,
        help="With --rollout async: how many updates rollouts may be ahead of the optimiser "
        "(default 1); 0 is the synchronous run, bitwise.",
    )
    max_logprob_drift: float | None = HfArg(
        default=0.2,
        help="Largest mean difference, in nats per token, of log-probabilities at sampling and in "
        "the trainer; more ends the run. None only reports it, and takes models whose scores in a "
        "batch differ from those of a row alone. Not checked where top_p, top_k, "
        "min_p or a repetition penalty is set.",
    )
    vllm_importance_sampling_mode: str = HfArg(
        default="token_truncate",
        help="As in TRL: importance ratios of each token ('token_truncate', 'token_mask') or of "
        "whole trajectories ('sequence_truncate', 'sequence_mask'). With --rollout async the loss "
        "clips ratios, and only the masks are used.",
    )

    merge_steps: ClassVar[bool] = True
    """Whether steps that extend each other share a row. The gradient is the same either way."""

    def __post_init__(self) -> None:
        """Check the settings, and refuse by name those that would break the loss."""
        ignore_renames()
        # Functions become import paths: checkpoints and other processes need plain text.
        for option in ("advantage_estimator", "loss_type"):
            if callable(given := getattr(self, option)):
                setattr(self, option, import_path(given, kind=option))
        follow_the_machine(self)
        check_ranges(self)  # some would be divided by
        switches = {"true": "group", "false": "none"}  # TRL takes booleans, too
        given = str(self.scale_rewards).lower()
        self.scale_rewards: str = switches.get(given, given)
        super().__post_init__()
        for option, names in (
            ("scale_rewards", SCALES),
            ("importance_sampling_level", RATIO_LEVELS), ("loss_denominator", DENOMINATORS),
            ("rollout", ("sync", "async")), ("vllm_importance_sampling_mode", IMPORTANCE_MODES),
        ):  # fmt: skip
            lookup(dict.fromkeys(names), getattr(self, option), kind=option)
        self._check_functions()
        for option, supported, reason in _REFUSALS:
            if (value := getattr(self, option)) not in supported:
                allowed = " or ".join(repr(choice) for choice in supported)
                raise ConfigurationError(
                    f"{option}={value!r} is not supported: {reason}. Set {option}={allowed}."
                )
        if self.rollout == "sync" and self.max_staleness is not None:
            raise ConfigurationError(
                f"max_staleness={self.max_staleness} does nothing with rollout='sync'. Leave it "
                "out, or set rollout='async'."
            )
        if self.num_steps_ahead and not self.vllm_importance_sampling_correction:
            raise ConfigurationError(
                "With rollout='async', vllm_importance_sampling_correction=False would train on "
                "episodes of older weights without importance ratios. Leave it out."
            )
        self.schedules = parse_schedules(self.reward_schedules)
        self.parsed_curriculum = parse_curriculum(self.curriculum)

    @property
    def estimator_settings(self) -> dict[str, Any]:
        """Options of the advantage estimator that do not depend on the batch."""
        known = estimator_options(self.advantage_estimator)
        settings = {"gamma": self.gamma, "lam": self.lam, "scale": self.scale_rewards}
        given = {k: v for k, v in settings.items() if k in known and v is not None}
        return given | json_object(self.estimator_kwargs, "estimator_kwargs")

    @property
    def num_steps_ahead(self) -> int:
        """Number of optimiser steps whose rollouts may start early; 0 in a synchronous run."""
        if self.rollout == "sync":
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    @property
    def generate_every(self) -> int:
        """Number of micro-batches of a generation batch, all its iterations together."""
        return int(self.steps_per_generation * self.num_iterations)

    @property
    def num_train_groups(self) -> int | None:
        """Number of groups of a run of ``max_steps`` optimiser steps; None without that limit."""
        if self.max_steps <= 0:
            return None
        micro_steps = self.max_steps * self.gradient_accumulation_steps
        num_batches = -(-micro_steps // self.generate_every)
        return int(num_batches * self.generation_batch_size // self.num_generations)

    def _check_functions(self) -> None:
        """Check that estimator and loss exist, take their options, and go with the others."""
        find_policy_loss(self.loss_type)
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ConfigurationError(
                f"loss_type='cispo' takes epsilon_high={self.epsilon_high} as the largest ratio "
                "itself. Set it to more than 1: 5.0 in ScaleRL (arXiv 2510.13786)."
            )
        is_bounded = self.delta is not None or self.epsilon != GRPOConfig.epsilon
        if self.loss_type == "cispo" and is_bounded:
            raise ConfigurationError(
                "delta and epsilon do nothing with loss_type='cispo', whose bound is epsilon_high. "
                "Leave them out."
            )
        estimator = self.advantage_estimator
        known = estimator_options(estimator)
        for name, value in self.estimator_settings.items():
            lookup(dict.fromkeys(known), name, kind=f"option of {estimator}")
            if name == "scale":
                check_scale(value)
        is_masked = self.advantage_mask or estimator == "gae_token" or ":" in estimator
        unused = {
            "gamma": self.gamma != 1.0 and "gamma" not in known,
            "lam": self.lam is not None and "lam" not in known,
            "scale_rewards": self.scale_rewards != "group" and "scale" not in known,
            "advantage_mask": not is_masked,
            "max_extra_groups": self.max_extra_groups and needs_values(estimator),
        }
        for option, is_unused in unused.items():
            if is_unused:
                raise ConfigurationError(
                    f"{option} does nothing with advantage_estimator={estimator!r}. Leave it out, "
                    "or use an estimator that reads it."
                )
        if needs_values(estimator) and not hasattr(self, "value_coef"):
            raise ConfigurationError(
                f"advantage_estimator={estimator!r} needs a critic: use StepPPOTrainer with "
                "StepPPOConfig, or agent-r1-train --algorithm ppo."
            )


@dataclass
class StepPPOConfig(StepGRPOConfig):
    """Settings of `StepPPOTrainer`, on top of `StepGRPOConfig`."""

    advantage_estimator: str = HfArg(
        default="gae_step",
        help="Maps rewards and values to advantages: one of "
        + ", ".join(name for name in ADVANTAGE_ESTIMATORS if needs_values(name))
        + ".",
    )
    critic_model: str | None = HfArg(
        default=None,
        help="Name or folder of the critic's model. Default: a value head on the policy.",
    )
    critic_learning_rate: float | None = HfArg(
        default=None,
        help="The critic's learning rate. Default: ten times learning_rate, as published.",
    )
    critic_warmup_steps: int = HfArg(
        default=0, help="Optimiser steps at the beginning that train the critic alone."
    )
    value_coef: float = HfArg(default=0.5, help="Weight of the value loss.")
    value_clip_range: float = HfArg(
        default=0.5, help="Clipping range of a value around its value at the start of the batch."
    )
    bootstrap_truncated: bool = HfArg(
        default=True,
        help="Bootstrap truncated episodes from the value of their last state. Switch it off where "
        "a tight turn limit belongs to the task.",
    )

    def __post_init__(self) -> None:
        """Check the critic's settings."""
        super().__post_init__()
        if not needs_values(self.advantage_estimator):
            raise ConfigurationError(
                f"advantage_estimator={self.advantage_estimator!r} uses no critic: use "
                "StepGRPOTrainer with StepGRPOConfig."
            )


def has_critic(algorithm: str) -> bool:
    """Return whether a preset trains a critic."""
    return needs_values(PRESETS[algorithm]["advantage_estimator"])


def config_class(algorithm: str) -> type[StepGRPOConfig]:
    """Return the class of a preset's settings."""
    return StepPPOConfig if has_critic(algorithm) else StepGRPOConfig


def follow_the_machine(config: Any) -> None:
    """Without an accelerator use the CPU, in float32 unless bf16 is set.

    Must run before TRL's own ``__post_init__``, whose default is bf16.
    """
    if not torch.accelerator.is_available():
        config.use_cpu = True
    if config.use_cpu and config.bf16 is None:
        config.bf16 = False


def ignore_renames() -> None:
    """Ignore warnings about names that TRL 1.16 uses and transformers 5.23 renamed."""
    warnings.filterwarnings("ignore", ".*gradient_checkpointing.*", FutureWarning)


def check_ranges(settings: Any) -> None:
    """Refuse numbers that are out of their range; None is in any."""
    for words, names in _RANGES.items():
        check_range(settings, words, *names)
