"""Official scores of the data sets."""

from agent_envs.scoring.answers import exact_match, f1, normalize_answer
from agent_envs.scoring.pass_at_k import pass_at_k

__all__ = ["exact_match", "f1", "normalize_answer", "pass_at_k"]
