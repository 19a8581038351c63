"""Step-level reinforcement learning for agents in text environments, on TRL and Accelerate.

The public names are imported when they are first used, so that ``import agent_trainers`` is fast
and ``Trajectory`` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from agent_trainers.algorithms.advantages import estimate as estimate
    from agent_trainers.cli.results import RunFiles as RunFiles
    from agent_trainers.gateway import Gateway as Gateway
    from agent_trainers.rollout.collector import Rollout as Rollout
    from agent_trainers.tiny_policy import TINY_POLICY as TINY_POLICY
    from agent_trainers.trainers.config import StepGRPOConfig as StepGRPOConfig
    from agent_trainers.trainers.config import StepPPOConfig as StepPPOConfig
    from agent_trainers.trainers.grpo import StepGRPOTrainer as StepGRPOTrainer
    from agent_trainers.trainers.ppo import StepPPOTrainer as StepPPOTrainer
    from agent_trainers.trajectory import Trajectory as Trajectory
    from agent_trainers.trajectory import Transition as Transition

_MODULES: Final = {
    "TINY_POLICY": "tiny_policy",
    "Gateway": "gateway",
    "Rollout": "rollout.collector",
    "RunFiles": "cli.results",
    "StepGRPOConfig": "trainers.config",
    "StepGRPOTrainer": "trainers.grpo",
    "StepPPOConfig": "trainers.config",
    "StepPPOTrainer": "trainers.ppo",
    "Trajectory": "trajectory",
    "Transition": "trajectory",
    "estimate": "algorithms.advantages",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
