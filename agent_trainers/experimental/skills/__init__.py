"""Skills: texts of successful episodes, and self-distillation from them."""

from agent_trainers.experimental.skills.skill_teacher import SkillDistillation

__all__ = ["SkillDistillation"]
