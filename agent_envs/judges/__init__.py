"""Judges: served models that score episodes by a rubric, as reward terms."""

from agent_envs.judges.endpoint import Endpoint
from agent_envs.judges.judge import BaseJudge, Judge, Judgement
from agent_envs.judges.rubric import Criterion

__all__ = ["BaseJudge", "Criterion", "Endpoint", "Judge", "Judgement"]
