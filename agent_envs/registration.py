"""The table of environments: id, class, defaults and turn limit."""

from typing import Any, Final

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, WrapperSpec

_WRAPPERS: Final = (
    WrapperSpec("KnownTurnLimit", "agent_envs.wrappers.turn_limit:KnownTurnLimit", {}),
)


def _spec(name: str, entry_point: str, turns: int, **kwargs: Any) -> EnvSpec:
    return EnvSpec(
        f"AgentR1/{name}-v0",
        f"agent_envs.envs.{entry_point}",
        max_episode_steps=turns,
        kwargs=kwargs,
        additional_wrappers=_WRAPPERS,
    )


ENVIRONMENTS: Final = (
    _spec("HotpotQA", "multihop_qa:HotpotQAEnv", 5),
    _spec("2WikiMultihopQA", "multihop_qa:TwoWikiMultihopQAEnv", 6),
    _spec("MuSiQue", "multihop_qa:MuSiQueEnv", 6),
    _spec("Bamboogle", "multihop_qa:BamboogleEnv", 5),
    _spec("NaturalQuestions", "open_qa:NaturalQuestionsEnv", 5),
    _spec("TriviaQA", "open_qa:TriviaQAEnv", 5),
    _spec("PopQA", "open_qa:PopQAEnv", 5),
    _spec("GSM8K", "math_problems:GSM8KEnv", 8),
    _spec("MATH", "math_problems:MATHEnv", 8),
    _spec("HumanEval", "code_problems:HumanEvalEnv", 6),
    _spec("MBPP", "code_problems:MBPPEnv", 6),
    _spec("CommandLine", "command_line:CommandLineEnv", 8),
    _spec("ReasoningGym", "reasoning:ReasoningGymEnv", 4),
    _spec("TextWorld", "text_world:TextWorldEnv", 20),
    _spec("ALFWorld", "text_world:ALFWorldEnv", 30),
    _spec("WebShop", "web_shop:WebShopEnv", 15),
    _spec("SyntheticMultiHop", "synthetic:SyntheticMultiHopEnv", 4),
    _spec("SyntheticLongHorizon", "synthetic:SyntheticMultiHopEnv", 10, questions=3),
    _spec("SyntheticArithmetic", "synthetic_tools:SyntheticArithmeticEnv", 10),
    _spec("SyntheticTable", "synthetic_tools:SyntheticTableEnv", 6),
)


def register_all() -> None:
    """Put every row of the table into Gymnasium's registry."""
    for spec in ENVIRONMENTS:
        if spec.id not in gym.registry:
            gym.register(
                spec.id,
                spec.entry_point,
                max_episode_steps=spec.max_episode_steps,
                kwargs=spec.kwargs,
                additional_wrappers=spec.additional_wrappers,
            )
