"""Settings of step-level GRPO: TRL's, a few of our own, and refusals by name."""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers.hf_argparser import HfArg
from trl import GRPOConfig

from agent_envs.core.lookup import import_path, lookup
from agent_envs.errors import ConfigurationError
from agent_trainers.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    estimator_options,
    find_estimator,
    needs_values,
    trains_branches,
    uses_branches,
)
from agent_trainers.algorithms.losses import (
    LOSS_ARGUMENTS,
    POLICY_LOSSES,
    RATIO_LEVELS,
    find_policy_loss,
)
from agent_trainers.algorithms.reward_schedules import parse_schedules
from agent_trainers.batching.per_token import DENOMINATORS
from agent_trainers.experimental.skills.skills import GROUP
from agent_trainers.tasks.curriculum import parse_curriculum
from agent_trainers.trainers.machine import follow_the_machine

# The loss must not change with row splitting, merging, padding, world size or micro-batching. What
# would break that, or would silently do nothing, is refused here: an option, what it may be, why.
_REFUSALS: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    (
        "vllm_importance_sampling_mode",
        ("token_truncate", "token_mask"),
        "a row may hold several steps, so a ratio per row would change with merging",
    ),
    (
        "enable_jit_checkpoint",
        (False,),
        "its signal handler saves on each process by itself; a stopped agent-r1-train saves on all "
        "of them at the same step",
    ),
    ("off_policy_mask_threshold", (None,), "it averages over rows"),
    ("top_entropy_quantile", (1.0,), "its quantile is one of a micro-batch"),
    ("entropy_coef", (0.0,), "its mean is one of a micro-batch"),
    ("use_adaptive_entropy", (False,), "its mean is one of a micro-batch"),
    ("cache_implementation", (None,), "generation keeps transformers' default cache"),
    ("generation_kwargs", (None,), "use temperature, top_p, top_k and min_p"),
    (
        "reward_weights",
        (None,),
        "the environment weighs its reward terms; pass rewards={name: weight} to it",
    ),
    (
        "multi_objective_aggregation",
        ("sum_then_normalize",),
        "the reward terms of a step are summed by the environment",
    ),
    (
        "max_tool_calling_iterations",
        (None,),
        "the turn limit is the environment's: gym.make(..., max_episode_steps=N)",
    ),
)


ESTIMATOR_OPTIONS: Final = ("gamma", "lam", "token_gamma", "token_lam", "step_advantage_weight")
"""Settings handed on to the advantage estimator, where given."""
Ranges = Mapping[str, tuple[Callable[[float], bool], Collection[str]]]
TRAINER_RANGES: Final[Ranges] = {
    "at least 1": (
        lambda x: x >= 1,
        (
            "per_device_train_batch_size", "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ),
    ),
    "at least 0": (lambda x: x >= 0, ("seed",)),
    "a number, at least 0": (lambda x: 0 <= x < math.inf, ("learning_rate",)),
}  # fmt: skip
"""Of settings that every trainer has, and that transformers does not look at before it trains."""
_RANGES: Final[Ranges] = {
    "in [0, 1]": (
        lambda x: 0 <= x <= 1,
        ("gamma", "lam", "token_gamma", "token_lam", "skill_weight"),
    ),
    "a number, 0 or more": (lambda x: 0 <= x < math.inf, ("branch_budget",)),
    "in (0, 1]": (lambda x: 0 < x <= 1, ("group_quorum", "max_fault_share")),
    "0 or more": (lambda x: x >= 0, ("max_extra_groups",)),
    "1 or more": (
        lambda x: x >= 1,
        ("max_prompt_length", "max_tokens_per_micro_batch", "max_completion_length"),
    ),
    "positive": (lambda x: x > 0, ("step_timeout", "episode_timeout", "temperature")),
    **TRAINER_RANGES,
}
_CHOICES: Final[Mapping[str, Collection[str]]] = {
    "importance_sampling_level": RATIO_LEVELS,
    "loss_denominator": DENOMINATORS,
    "kl_placement": ("loss", "reward"),
    "skill_teacher": ("policy", "reference"),
    "transformers_generation": ("auto", "slots", "waves"),
}
_NEED_MERGED_ROWS: Final = {
    "importance_sampling_level": "sequence",
    "loss_mask": False,
    "advantage_mask": False,
}


@dataclass
class StepGRPOConfig(GRPOConfig):  # type: ignore[misc] # TRL is untyped
    """Settings of `StepGRPOTrainer`, on top of ``trl.GRPOConfig``.

    ``max_completion_length`` is the length of one turn. What the loss is averaged over is
    ``loss_denominator``, always of the whole batch, over all processes.
    ``importance_sampling_level`` is ``"token"``, ``"step"`` (mean of the step's log-ratios),
    ``"product"`` (their sum) or ``"sequence"`` (mean over the trajectory). ``advantage_estimator``
    and ``loss_type`` may be functions of your own; they are kept as import paths.
    """

    advantage_estimator: str = HfArg(
        default="grpo",
        help="How rewards become advantages: one of "
        + ", ".join(ADVANTAGE_ESTIMATORS)
        + ", or the import path of your own, 'my_module:my_estimator'.",
    )
    loss_type: str = HfArg(
        default="dapo",
        help="The policy loss of a token: 'dapo' (clipped policy gradient), 'cispo', or the "
        "import path of your own, 'my_module:my_loss', which may take "
        + ", ".join(LOSS_ARGUMENTS)
        + " by name and returns a loss per token.",
    )
    gamma: float = HfArg(
        default=1.0, help="Discount in [0, 1], per step (one model turn); per token in gae_token."
    )
    lam: float | None = HfArg(
        default=None, help="Lambda of generalised advantages, in [0, 1]. Default: 1."
    )
    token_gamma: float | None = HfArg(
        default=None, help="gae_bilevel: discount per token inside a step. Default: 1."
    )
    token_lam: float | None = HfArg(
        default=None, help="gae_bilevel: lambda per token inside a step. Default: 1."
    )
    step_advantage_weight: float | None = HfArg(
        default=None, help="gigpo: weight of the step's part of the advantage. Default: 1."
    )
    branch_budget: float | None = HfArg(
        default=None,
        help="vine, tree, and estimators of your own with uses_branches: environment steps that "
        "the branches of a batch may take, for each step of its episodes, with those that are "
        "taken again to come to a state; as far as can be foreseen. Default: a third.",
    )
    loss_denominator: str = HfArg(
        default="token",
        help="What the loss is a mean over: every trained 'token' of the batch, every 'step' (the "
        "mean of its tokens), or every 'trajectory' (the mean of its tokens).",
    )
    loss_mask: bool = HfArg(
        default=True,
        help="Train sampled tokens only. Off, observations inside a row are trained with the "
        "advantage of the action before them: to show what the mask is good for.",
    )
    advantage_mask: bool = HfArg(
        default=True,
        help="gae_token: credit runs over sampled tokens only. Off, observation tokens advance "
        "and decay it too: to show what the mask is good for.",
    )
    kl_placement: str = HfArg(
        default="loss",
        help="Where beta weighs the divergence from the reference: in the 'loss' (low-variance "
        "estimate per token), or taken off the 'reward' of each step (sum over its tokens). "
        "Sampled tokens only, either way.",
    )
    use_bias_correction_kl: bool = HfArg(
        default=False,
        help="Whether the divergence in the loss is multiplied by each token's importance ratio, "
        "at most 3, as in DeepSeek-V3.2 (arXiv 2512.02556): its gradient is then unbiased, also on "
        "tokens of older weights. Off, unlike in TRL, it is the plain low-variance estimate of "
        "GRPO and of the Agent-R1 paper.",
    )
    skill_weight: float = HfArg(
        default=0.0,
        help="Self-distillation: share of the loss, in [0, 1], that draws the policy to what it "
        "would say itself if it knew a skill (the reverse KL divergence of SDPO and Skill-SD, on "
        "sampled tokens); the rest is the policy gradient. Only this teacher reads skills, never "
        "the policy that acts or is evaluated.",
    )
    skills: str = HfArg(
        default=GROUP,
        help="Where skills come from: 'group', what the best other episode of the group did, if it "
        "succeeded; or a file of rows with 'skill' and 'task_id', as the skills command writes it. "
        "Rows without task_id are for every task that has none of its own.",
    )
    skill_teacher: str = HfArg(
        default="policy",
        help="Whose weights the teacher has: those of the 'policy' when the batch is played, or of "
        "the 'reference' that beta keeps, which stays able to use a skill while the policy changes "
        "(sync_ref_model has it follow slowly).",
    )
    reward_schedules: str | None = HfArg(
        default=None,
        help='What reward terms are multiplied with over the run, as JSON: \'{"new_gold_passage": '
        '{"kind": "linear", "start": 1, "end": 0}}\'. Kinds: constant, linear, cosine, adaptive '
        "(start until 'metric' reaches 'target', then end).",
    )
    curriculum: str | None = HfArg(
        default=None,
        help="Which task comes next, by what was solved so far: 'levels' (environments easy to "
        "hard; the next begins when the newest is solved), 'learning_progress' (environments whose "
        "success moves are played more), 'pools' (tasks that are solved at times are played more), "
        'or JSON: \'{"kind": "levels", "arguments": {"hops": [1, 2, 3]}, "target": 0.8}\'.',
    )
    max_extra_groups: int = HfArg(
        default=0,
        help="Dynamic sampling (DAPO, arXiv 2503.14476): groups whose episodes all earned the same "
        "are played anew with other tasks, at most so many of them for a batch; 0 for none.",
    )
    merge_steps: bool = HfArg(
        default=True,
        help="Train steps that extend each other as one row. The gradient is the same, the work "
        "less; switch it off only to compare.",
    )
    max_tokens_per_micro_batch: int | None = HfArg(
        default=None,
        help="Tokens that go through the model at once, padding included: rows are sorted by "
        "length and packed under this budget, so memory stays flat however many rows the steps "
        "make. The gradient is the same. Default: per_device_train_batch_size rows at once, "
        "however long.",
    )
    max_prompt_length: int | None = HfArg(
        default=None,
        help="Longest state in tokens; an episode whose state outgrows it ends there as "
        "truncated. Default: what the model's context leaves beside max_completion_length.",
    )
    step_timeout: float = HfArg(
        default=300.0,
        help="Seconds that a reset or a step of an environment may take before it is given up and "
        "its episode left out. Tools have timeouts of their own.",
    )
    episode_timeout: float | None = HfArg(
        default=None,
        help="Seconds that an episode may take before it is left out; no limit if not given.",
    )
    group_quorum: float = HfArg(
        default=1.0,
        help="Share of each group's episodes that has to end: as soon as all groups have it, the "
        "stragglers are left out. Below 1 it favours what ends early.",
    )
    transformers_generation: str = HfArg(
        default="auto",
        help="How transformers generates. 'slots': episodes join and leave a batch token by token "
        "and keep their keys and values between turns. 'waves': model.generate, batch after "
        "batch. 'auto': slots where model and settings allow it, else waves.",
    )
    max_fault_share: float | None = HfArg(
        default=0.5,
        help="Largest share of a batch's episodes that may fail through no fault of the model: "
        "more in three batches running, or all of one, end the run with the first error. None "
        "only counts them.",
    )
    max_logprob_drift: float | None = HfArg(
        default=0.2,
        help="Largest mean difference, in nats per token, between the log-probabilities of "
        "sampled tokens when they were sampled and when the trainer computes them with the same "
        "weights. More means that template, tokens or weights differ, and is refused. None only "
        "reports it. Not checked where top_p, top_k, min_p or a repetition penalty change the "
        "distribution.",
    )
    vllm_importance_sampling_mode: str = HfArg(
        default="token_truncate", help="As in TRL; only its token-level modes are supported."
    )

    def __post_init__(self) -> None:
        """Check our own settings, and refuse by name what would break the loss."""
        # Functions become import paths: settings are plain text in checkpoints and other processes.
        for option in ("advantage_estimator", "loss_type"):
            if callable(given := getattr(self, option)):
                setattr(self, option, import_path(given, kind=option))
        follow_the_machine(self)
        super().__post_init__()
        self._check_functions()
        for option, names in _CHOICES.items():
            lookup(dict.fromkeys(names), getattr(self, option), kind=option)
        check_ranges(self, _RANGES)
        for option, supported, reason in _REFUSALS:
            if (value := getattr(self, option)) not in supported:
                allowed = " or ".join(repr(choice) for choice in supported)
                raise ConfigurationError(
                    f"{option}={value!r} is not supported with step rows: {reason}. "
                    f"Set {option}={allowed}."
                )
        self._refuse_what_would_do_nothing()
        if self.kl_placement == "reward" and self.branch_steps > 0 and not self.trains_branches:
            raise ConfigurationError(
                f"kl_placement='reward' does not go with advantage_estimator="
                f"{self.advantage_estimator!r}, whose branches only measure: their rewards would "
                "lack what is taken off the others'. Use kl_placement='loss', or "
                "advantage_estimator='tree'."
            )
        for option, refused in _NEED_MERGED_ROWS.items():
            if not self.merge_steps and getattr(self, option) == refused:
                raise ConfigurationError(
                    f"{option}={refused!r} needs whole trajectories in a row; set merge_steps=True."
                )
        self.schedules = parse_schedules(self.reward_schedules)
        self.parsed_curriculum = parse_curriculum(self.curriculum)

    @property
    def estimator_settings(self) -> dict[str, Any]:
        """The options of the advantage estimator that do not depend on the batch."""
        known = estimator_options(self.advantage_estimator)
        given = {name: getattr(self, name) for name in ESTIMATOR_OPTIONS}
        given["scale"] = self.scale_rewards
        return {name: value for name, value in given.items() if name in known and value is not None}

    @property
    def branch_steps(self) -> float:
        """Environment steps of branches for each step of a batch's episodes; 0 for no branches."""
        if self.branch_budget is not None:
            return self.branch_budget
        return 1 / 3 if uses_branches(self.advantage_estimator) else 0.0

    @property
    def trains_branches(self) -> bool:
        """Whether the policy learns from branches, too."""
        return trains_branches(self.advantage_estimator)

    def _check_functions(self) -> None:
        """Make sure that estimator and loss are there and take what they are given."""
        if self.loss_type not in POLICY_LOSSES and ":" not in self.loss_type:
            raise ConfigurationError(
                f"loss_type={self.loss_type!r} is not supported with step rows: TRL's others "
                "average over rows or micro-batches, so the loss would change with merging, "
                "padding and micro-batch size; loss_denominator says what is averaged over. Set "
                f"loss_type={' or '.join(map(repr, POLICY_LOSSES))}, or a function of your own."
            )
        _check_arguments("loss_type", find_policy_loss(self.loss_type), LOSS_ARGUMENTS)
        if self.loss_type == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            raise ConfigurationError(
                "loss_type='cispo' takes epsilon_high as the largest ratio itself: with "
                f"epsilon_high={self.epsilon_high} every gradient would shrink. Set it to more "
                "than 1: 5.0 in ScaleRL (arXiv 2510.13786)."
            )
        estimator = functools.partial(find_estimator(self.advantage_estimator), [])
        given = (*ESTIMATOR_OPTIONS, "scale", "values", "bootstrap_values", "whiten")
        _check_arguments("advantage_estimator", estimator, given)

    def _unused_by_estimator(self) -> list[str]:
        """Return the options given that the estimator does not take."""
        estimator = self.advantage_estimator
        known = estimator_options(estimator)
        given = [name for name in ESTIMATOR_OPTIONS if getattr(self, name) is not None]
        unused = [name for name in given if name not in (*known, "gamma")]
        if self.scale_rewards != "group" and "scale" not in known:
            unused.append("scale_rewards")
        is_own = estimator not in ADVANTAGE_ESTIMATORS
        if not self.advantage_mask and estimator != "gae_token" and not is_own:
            unused.append("advantage_mask")
        if self.branch_budget is not None and not uses_branches(estimator):
            unused.append("branch_budget")
        return unused

    def _refuse_what_would_do_nothing(self) -> None:
        estimator = self.advantage_estimator
        if unused := self._unused_by_estimator():
            raise ConfigurationError(
                f"{unused[0]} does nothing with advantage_estimator={estimator!r}. Leave it out, "
                "or choose an estimator that has it."
            )
        if self.kl_placement == "reward" and self.beta == 0.0:
            raise ConfigurationError("kl_placement='reward' does nothing with beta=0: set beta.")
        for option, default in (("skills", GROUP), ("skill_teacher", "policy")):
            if (given := getattr(self, option)) != default and self.skill_weight == 0.0:
                raise ConfigurationError(f"{option}={given!r} does nothing with skill_weight=0.")
        if self.max_extra_groups and (needs_values(estimator) or self.branch_steps > 0):
            raise ConfigurationError(
                f"max_extra_groups={self.max_extra_groups} plays groups anew that have nothing to "
                f"compare, and advantage_estimator={estimator!r} compares states, not groups. "
                "Leave it out, or choose an estimator such as 'grpo'."
            )
        if self.skill_teacher == "reference" and self.beta == 0.0:
            raise ConfigurationError(
                "skill_teacher='reference' needs a reference, and with beta=0 there is none: set "
                "beta, however small, or skill_teacher='policy'."
            )
        if needs_values(estimator) and not hasattr(self, "value_coef"):
            raise ConfigurationError(
                f"advantage_estimator={estimator!r} needs a critic: use StepPPOTrainer with "
                "StepPPOConfig, or agent-r1-train --algorithm ppo."
            )


def check_ranges(settings: StepGRPOConfig, ranges: Ranges) -> None:
    """Refuse numbers that are out of their range; None is in any."""
    for words, (is_in, options) in ranges.items():
        for option in options:
            if (value := getattr(settings, option)) is not None and not is_in(value):
                raise ConfigurationError(f"{option} must be {words}, not {value}.")


def _check_arguments(option: str, function: Callable[..., Any], given: Collection[str]) -> None:
    """Refuse a function that cannot do without what nobody gives it."""
    for name, parameter in inspect.signature(function).parameters.items():
        is_needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if is_needed and name not in given:
            raise ConfigurationError(
                f"The function of {option} takes {name!r}, which the trainer does not give. It "
                f"gives: {', '.join(given)}. Give {name!r} a default."
            )
