"""Official scores of the data sets."""

from agent_envs.scoring.answers import (
    answer_overlap,
    exact_match,
    f1,
    normalize_answer,
    squad_f1,
)
from agent_envs.scoring.musique import musique_group_scores
from agent_envs.scoring.overlap import (
    Overlap,
    best_overlap,
    joint_overlap,
    set_match,
    set_overlap,
)
from agent_envs.scoring.pass_at_k import pass_at_k, pass_hat_k
from agent_envs.scoring.statistics import drop_interval, wilson_interval

__all__ = [
    "Overlap",
    "answer_overlap",
    "best_overlap",
    "drop_interval",
    "exact_match",
    "f1",
    "joint_overlap",
    "musique_group_scores",
    "normalize_answer",
    "pass_at_k",
    "pass_hat_k",
    "set_match",
    "set_overlap",
    "squad_f1",
    "wilson_interval",
]
