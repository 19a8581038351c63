"""Settings of step-level GRPO: TRL's, a few of our own, and refusals by name."""

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from trl import GRPOConfig

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.advantages import ADVANTAGE_ESTIMATORS


class _Refusal(NamedTuple):
    option: str
    supported: tuple[Any, ...]
    reason: str


# The loss must not change with row splitting, merging, padding, world size or micro-batching
# (DESIGN section 5). What would break that, or would silently do nothing, is refused here.
_REFUSALS: Final = (
    _Refusal(
        "loss_type",
        ("dapo", "cispo"),
        "the others average over rows or micro-batches, so the loss would change with merging, "
        "padding and micro-batch size",
    ),
    _Refusal(
        "importance_sampling_level",
        ("token",),
        "a row may hold several steps, so a ratio per row would change with merging",
    ),
    _Refusal(
        "vllm_importance_sampling_mode",
        ("token_truncate", "token_mask"),
        "a row may hold several steps, so a ratio per row would change with merging",
    ),
    _Refusal("off_policy_mask_threshold", (None,), "it averages over rows"),
    _Refusal("top_entropy_quantile", (1.0,), "its quantile is one of a micro-batch"),
    _Refusal("entropy_coef", (0.0,), "its mean is one of a micro-batch"),
    _Refusal("use_adaptive_entropy", (False,), "its mean is one of a micro-batch"),
    _Refusal(
        "use_transformers_continuous_batching",
        (False,),
        "it returns no log-probabilities of the sampled tokens; use vLLM, or plain generation",
    ),
    _Refusal("cache_implementation", (None,), "generation keeps transformers' default cache"),
    _Refusal("generation_kwargs", (None,), "use temperature, top_p, top_k and min_p"),
    _Refusal(
        "reward_weights",
        (None,),
        "the environment weighs its reward terms; pass rewards={name: weight} to it",
    ),
    _Refusal(
        "multi_objective_aggregation",
        ("sum_then_normalize",),
        "the reward terms of a step are summed by the environment",
    ),
    _Refusal(
        "max_tool_calling_iterations",
        (None,),
        "the turn limit is the environment's: gym.make(..., max_episode_steps=N)",
    ),
)


@dataclass
class StepGRPOConfig(GRPOConfig):  # type: ignore[misc] # TRL is untyped
    """Settings of `StepGRPOTrainer`, on top of ``trl.GRPOConfig``.

    ``max_completion_length`` is the length of one turn. ``loss_type`` is ``"dapo"`` or ``"cispo"``:
    their denominator is the number of trained tokens of the whole batch, over all processes.
    """

    advantage_estimator: str = field(
        default="grpo",
        metadata={
            "help": "How rewards become advantages: 'grpo' (group-normalised return, the same for "
            "every step) or 'grpo_step' (group-normalised return-to-go of each step)."
        },
    )
    gamma: float = field(
        default=1.0, metadata={"help": "Discount per step (one model turn), in [0, 1]."}
    )
    merge_steps: bool = field(
        default=True,
        metadata={
            "help": "Train steps that extend each other as one row. The gradient is the same, the "
            "work less; switch it off only to compare."
        },
    )
    max_prompt_length: int | None = field(
        default=None,
        metadata={
            "help": "Longest state in tokens; an episode whose state outgrows it ends there as "
            "truncated. Default: what the model's context leaves beside max_completion_length."
        },
    )
    step_timeout: float = field(
        default=300.0,
        metadata={
            "help": "Seconds that one wave of environment steps may take before those that hang "
            "are given up. Tools have timeouts of their own."
        },
    )
    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={"help": "As in TRL; only its token-level modes are supported."},
    )

    def __post_init__(self) -> None:
        """Check our own settings, and refuse by name what would break the loss."""
        super().__post_init__()
        lookup(ADVANTAGE_ESTIMATORS, self.advantage_estimator, kind="advantage estimator")
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigurationError(f"gamma must be in [0, 1], not {self.gamma}.")
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ConfigurationError(
                f"max_prompt_length must be at least 1, not {self.max_prompt_length}."
            )
        if self.step_timeout <= 0:
            raise ConfigurationError(f"step_timeout must be positive, not {self.step_timeout}.")
        for option, supported, reason in _REFUSALS:
            if (value := getattr(self, option)) not in supported:
                allowed = " or ".join(repr(choice) for choice in supported)
                raise ConfigurationError(
                    f"{option}={value!r} is not supported with step rows: {reason}. "
                    f"Set {option}={allowed}."
                )
