"""The table of environments: id, class, defaults and turn limit."""

from typing import Any, Final

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec


def _spec(name: str, entry_point: str, turns: int, **kwargs: Any) -> EnvSpec:
    id = f"AgentR1/{name}-v0"
    # Gymnasium's wrappers for these two want a reset first, but an episode may also begin with
    # `restore`. ToolEnv enforces the order itself, and the kit checks more than the checker.
    return EnvSpec(
        id,
        f"agent_envs.envs.{entry_point}",
        vector_entry_point=f"agent_envs.core.vector_env:{id}",
        max_episode_steps=turns,
        order_enforce=False,
        disable_env_checker=True,
        kwargs=kwargs,
    )


ENVIRONMENTS: Final = (
    _spec("HotpotQA", "qa.datasets:HotpotQAEnv", 5),
    _spec("2WikiMultihopQA", "qa.datasets:TwoWikiMultihopQAEnv", 6),
    _spec("MuSiQue", "qa.datasets:MuSiQueEnv", 6),
    _spec("ClaimVerification", "qa.claims:ClaimVerificationEnv", 12),
    _spec("ClaimReview", "qa.claim_review:ClaimReviewEnv", 16),
    _spec("Bamboogle", "qa.datasets:BamboogleEnv", 5),
    _spec("NaturalQuestions", "qa.datasets:NaturalQuestionsEnv", 5),
    _spec("TriviaQA", "qa.datasets:TriviaQAEnv", 5),
    _spec("PopQA", "qa.datasets:PopQAEnv", 5),
    _spec("GSM8K", "math.problems:GSM8KEnv", 8),
    _spec("MATH", "math.problems:MATHEnv", 8),
    _spec("HumanEval", "code.problems:HumanEvalEnv", 6),
    _spec("MBPP", "code.problems:MBPPEnv", 6),
    _spec("CommandLine", "shell.command_line:CommandLineEnv", 8),
    _spec("ReasoningGym", "math.reasoning:ReasoningGymEnv", 4),
    _spec("TextWorld", "games.text_world:TextWorldEnv", 20),
    _spec("ALFWorld", "games.text_world:ALFWorldEnv", 30),
    _spec("ScienceWorld", "games.science_world:ScienceWorldEnv", 200),
    _spec("TextWorldExpress", "games.text_world_express:TextWorldExpressEnv", 50),
    _spec("WebShop", "web.web_shop:WebShopEnv", 15),
    _spec("BFCL", "functions.bfcl:BFCLEnv", 60),
    _spec("Tau2Retail", "dialogue.tau2:Tau2RetailEnv", 50),
    _spec("Tau2Airline", "dialogue.tau2:Tau2AirlineEnv", 50),
    _spec("AgentDojo", "functions.agent_dojo:AgentDojoEnv", 30),
    _spec("SyntheticMultiHop", "synthetic.multi_hop:SyntheticMultiHopEnv", 4),
    _spec("SyntheticLongHorizon", "synthetic.multi_hop:SyntheticMultiHopEnv", 10, questions=3),
    _spec("SyntheticArithmetic", "synthetic.tool_chains:SyntheticArithmeticEnv", 10),
    _spec("SyntheticTable", "synthetic.tool_chains:SyntheticTableEnv", 6),
    _spec("SyntheticBifurcation", "synthetic.bifurcation:SyntheticBifurcationEnv", 12),
    _spec("SyntheticMarket", "synthetic.market:SyntheticMarketEnv", 12),
    _spec("AdversarialEdits", "synthetic.adversary:AdversarialEditsEnv", 12),
)

REMOTE: Final = EnvSpec(
    "AgentR1/Remote-v0",
    "agent_envs.remote.env:RemoteEnv",
    vector_entry_point="agent_envs.core.vector_env:AgentR1/Remote-v0",
    order_enforce=False,
    disable_env_checker=True,
)
"""Client of any of the others on another machine; tasks and turn limit are those of the server."""


def register_all() -> None:
    """Register every row of the table, and the remote environment."""
    for spec in (*ENVIRONMENTS, REMOTE):
        gym.registry.setdefault(spec.id, spec)
