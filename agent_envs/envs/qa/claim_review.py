"""Claims verified by two roles: a solver, and a critic that reviews its verdict."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.core.rewards import Earnings, RewardFunction, noted_terms
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_env import NewConversation
from agent_envs.envs.qa.claims import ClaimVerificationEnv
from agent_envs.errors import ConfigurationError
from agent_envs.formats.control_strings import break_control_strings
from agent_envs.formats.tool_formats import ParsedAction
from agent_envs.retrieval import Hit
from agent_envs.tools.pages import folded

SOLVER: Final = "solver"
CRITIC: Final = "critic"
ACCEPT: Final = "accept"
CRITIC_PROMPT: Final = (
    "Another agent verifies a claim. Review its verdict: do the passages that it cites decide "
    f'about the claim, and as it says? Answer with the one word "{ACCEPT}", or with what is wrong '
    "or missing, which the agent will read before it answers again."
)
REVIEW_TEXT: Final = "{claim}\nProposed verdict: {verdict}\nCited evidence:\n{evidence}"
NO_EVIDENCE_TEXT: Final = "None."
UNSEEN_TEXT: Final = "No search has shown this passage."
REJECTED_TEXT: Final = "The critic sends your verdict back: {reason}"


def change_of(name: str) -> RewardFunction:
    """Make a term with the change of the proposal's score in a step; it sums to the last score."""
    return lambda env, event: env.proposal_scores()[name] - env.scores_before[name]


class ClaimReviewEnv(ClaimVerificationEnv):
    """Claims as in `ClaimVerificationEnv`, verified by a solver and a critic.

    Task: the solver searches, cites and gives a verdict. The critic sees, in a conversation of its
    own and without tools, the claim, the verdict and the cited passages. It answers "accept", which
    ends the episode, or else what is wrong; then the solver continues with that as the reply. After
    ``reviews`` reviews, the next verdict ends the episode. ``info["agent_role"]`` names the role
    that took a step, which has its own baseline in training.

    Reward terms: those of the claims, and ``review`` (-1 where the critic accepts what is not
    exactly right, or sends back what is; process). ``exact_match``, ``f1``, ``citation_f1`` and
    ``joint_em`` are paid when they change, from the first verdict on, and both roles share them.
    Any other term of a step counts for the role alone that took it: ``info["reward_owners"]``.

    Version history: v0, first version.
    """

    reward_functions = {
        **{k: f for k, f in ClaimVerificationEnv.reward_functions.items()
           if k != "format_and_answer"},
        **{name: change_of(name) for name in ("exact_match", "f1", "citation_f1", "joint_em")},
        **noted_terms("review"),
    }  # fmt: skip
    only_appends = False
    outcome_terms = ClaimVerificationEnv.outcome_terms - {"format_and_answer"}
    default_rewards = {**ClaimVerificationEnv.default_rewards, "review": 0.1}
    metric_names = (
        *ClaimVerificationEnv.metric_names, "num_rejections", "first_joint_em"
    )  # fmt: skip

    def __init__(self, *, reviews: int = 1, **rest: Any) -> None:
        """Load claims and passages.

        Args:
            reviews: Verdicts that the critic reviews at most.
            rest: Arguments of `ClaimVerificationEnv`.
        """
        if reviews < 1:
            raise ConfigurationError(
                f"reviews must be at least 1, not {reviews}. Without reviews it is "
                "AgentR1/ClaimVerification-v0."
            )
        self._max_reviews = reviews
        super().__init__(**rest)

    @classmethod
    def earnings(cls, *, reviews: int = 1, **arguments: Any) -> Mapping[str, Earnings]:
        cost = (-float(reviews), 0.0)
        return {**super().earnings(**arguments), "review": Earnings(cost, cost)}

    def begin_episode(self) -> None:
        super().begin_episode()
        self.role = SOLVER
        """Role that acts next."""
        self._num_reviews, self._num_rejections, self._first_score = 0, 0, 0.0
        self._verdict: str | None = None
        self._proposal = ""
        self._shown: dict[str, str] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self._acting = self.role
        self.scores_before = self.proposal_scores()

    def proposal_scores(self) -> Mapping[str, float]:
        """Return the metrics, all 0 before the first verdict."""
        measured = self.metrics()
        return measured if self._verdict is not None else dict.fromkeys(measured, 0.0)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        # a judge of the whole episode scores the team
        team = {n for n, (f, _) in self._terms.items() if not getattr(f, "each_step", True)}
        own = [name for name in info["reward_terms"] if name not in self.outcome_terms | team]
        info |= {"agent_role": self._acting, "reward_owners": dict.fromkeys(own, self._acting)}
        return observation, reward, terminated, truncated, info

    def on_result(self, action: ParsedAction, result: ToolResult) -> None:
        super().on_result(action, result)
        hits = result.data if isinstance(result.data, list) else []
        passages = (self.show_passage(hit.passage) for hit in hits if isinstance(hit, Hit))
        self._shown |= {folded(passage.title): passage.text for passage in passages}

    def on_answer(self, answer: str) -> str | NewConversation | None:  # type: ignore[override]
        if self._acting == CRITIC:
            return self._review(answer)
        self._verdict, self._scores = answer, []
        super().on_answer(answer)
        if self._num_reviews == 0:
            self._first_score = self.metrics()["joint_em"]
        if self._num_reviews == self._max_reviews:
            return None
        self.role = CRITIC
        return NewConversation(self._review_question())

    def _review(self, answer: str) -> str | None:
        """Judge the critic's review; return the solver's next message, or None if it accepts."""
        self.answer = self._verdict
        self._num_reviews += 1
        is_accepted = folded(answer).strip(".!") == ACCEPT
        self.noted["review"] -= is_accepted != (self.metrics()["joint_em"] == 1.0)
        if is_accepted:
            return None
        self._num_rejections += 1
        self.role = SOLVER
        return REJECTED_TEXT.format(reason=break_control_strings(answer, by="tool"))

    def _review_question(self) -> str:
        titles = dict.fromkeys(n.title for n in self._notebook.notes.values() if n.title)
        passages = (f"{each}\n{self._shown.get(folded(each), UNSEEN_TEXT)}" for each in titles)
        evidence = "\n".join(f"[{rank}] {text}" for rank, text in enumerate(passages, 1))
        text = REVIEW_TEXT.format(
            claim=self.task.question, verdict=self._verdict, evidence=evidence or NO_EVIDENCE_TEXT
        )
        return break_control_strings(text, by="tool")

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {
            "num_rejections": float(self._num_rejections), "first_joint_em": self._first_score
        }  # fmt: skip

    def reference_actions(self) -> list[str]:
        """Search and cite each gold passage, give the verdict, and accept it."""
        return [*super().reference_actions(), self.write_answer(ACCEPT)]

    def pinned_text(self) -> str:
        return "" if self.role == CRITIC else super().pinned_text()

    # The conversation of the critic

    def _understand(self, action: str) -> ParsedAction:
        if self._acting == CRITIC and not self._conversation.is_summary_requested:
            return self._format.parse(action, {})
        return super()._understand(action)

    def _continue(self, action: str, reply: Sequence[Message] | NewConversation | None) -> str:
        if isinstance(reply, NewConversation):  # the solver's is continued after the review
            self._proposal, self._solver = action, self._conversation
            self._conversation = copy.copy(self._solver)
            has_prompt = self._given_prompt != ""
            prompt = f"{CRITIC_PROMPT}\n{self._format.instructions([])}" if has_prompt else ""
            self._conversation.begin(prompt, reply.question)
            return reply.question
        if self._acting == CRITIC and self.role == SOLVER:
            self._conversation, action = self._solver, self._proposal
        return super()._continue(action, reply)

    def _info(self) -> dict[str, Any]:
        info = super()._info()
        return info if self.role == SOLVER else {**info, "tools": []}
