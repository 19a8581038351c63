"""Official scores of the data sets."""

from agent_envs.scoring.answers import (
    Overlap,
    answer_overlap,
    best_overlap,
    exact_match,
    f1,
    joint_overlap,
    normalize_answer,
    set_match,
    set_overlap,
    squad_f1,
)
from agent_envs.scoring.musique import musique_group_scores
from agent_envs.scoring.pass_at_k import pass_at_k, pass_hat_k
from agent_envs.scoring.statistics import wilson_interval

__all__ = [
    "Overlap",
    "answer_overlap",
    "best_overlap",
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
