"""Skills: texts of successful episodes, and self-distillation from them."""

from agent_trainers.experimental.skills.distillation import SkillDistillation

__all__ = ["SkillDistillation"]
