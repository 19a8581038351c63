"""Questions that take several passages of Wikipedia: search, hop, answer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from agent_envs.core.rewards import NOTHING, Earnings
from agent_envs.envs.qa.passages import PassageQAEnv
from agent_envs.envs.qa.rows import (
    BAMBOOGLE,
    FULL_MUSIQUE,
    HOTPOTQA,
    MUSIQUE,
    TWO_WIKI,
    UNANSWERABLE,
)
from agent_envs.retrieval import Passage
from agent_envs.scoring import squad_f1


class HotpotQAEnv(PassageQAEnv):
    """HotpotQA (Yang et al., 2018, arXiv 1809.09600) as an environment.

    Task: answer a question whose answer takes two passages. Tools, rewards and metrics: see
    `PassageQAEnv`; metrics of citations are the official supporting-fact and joint scores. The
    episode ends with an answer, or at the turn limit (5 turns unless ``max_episode_steps=`` says
    otherwise). Hub: ``hotpotqa/hotpot_qa``, distractor setting.

    Version history: v0, first version.
    """

    dataset = HOTPOTQA


class TwoWikiMultihopQAEnv(PassageQAEnv):
    """2WikiMultihopQA (Ho et al., 2020, arXiv 2011.01060) as an environment.

    Task: answer a question over two to four passages. Tools, rewards and metrics: see
    `PassageQAEnv`; notes written ``subject | relation | object`` are the evidence, which the joint
    scores include, as in the official script. The episode ends with an answer, or at the turn limit
    (6 turns unless ``max_episode_steps=`` says otherwise). Hub: ``xanhho/2WikiMultihopQA``.

    Version history: v0, first version.
    """

    dataset = TWO_WIKI


class MuSiQueEnv(PassageQAEnv):
    """MuSiQue (Trivedi et al., 2022, arXiv 2108.00573) as an environment.

    Task: answer a question over two to four passages; aliases of the answer count. Tools, rewards
    and metrics: see `PassageQAEnv`; F1 is that of the official script. The episode ends with an
    answer, or at the turn limit (6 turns unless ``max_episode_steps=`` says otherwise). Hub:
    ``dgslibisey/MuSiQue``.

    Version history: v0, first version.
    """

    dataset = MUSIQUE
    f1_rule = staticmethod(squad_f1)

    def __init__(self, *, unanswerable: bool = False, **rest: Any) -> None:
        """Load tasks and passages.

        Args:
            unanswerable: Play questions too whose passages do not hold the answer (MuSiQue-Full);
                the right answer to them is "unanswerable".
            rest: See `PassageQAEnv`.
        """
        self._plays_unanswerable = unanswerable
        if unanswerable:
            self.dataset = FULL_MUSIQUE
        super().__init__(**rest)

    def _full_prompt(self) -> str:
        hint = f" If the passages do not hold the answer, answer: {UNANSWERABLE}."
        first, *rest = super()._full_prompt().split("\n")
        return "\n".join([first + hint * self._plays_unanswerable, *rest])

    def passage_key(self, passage: Passage) -> str:
        """Return title and text: titles are not unique here."""
        return f"{passage.title}\n{passage.text}"


class BamboogleEnv(PassageQAEnv):
    """Bamboogle (Press et al., 2023, arXiv 2210.03350) as an environment.

    Task: answer a question of two hops. The data set has no passages: pass ``corpus=``. Tools,
    rewards and metrics: see `PassageQAEnv`. The episode ends with an answer, or at the turn limit
    (5 turns unless ``max_episode_steps=`` says otherwise). Hub: ``chiayewken/bamboogle``.

    Version history: v0, first version.
    """

    dataset = BAMBOOGLE
    term_earnings: ClassVar[Mapping[str, Earnings]] = {
        **PassageQAEnv.term_earnings,
        "new_gold_passage": NOTHING,
    }

    def metrics(self) -> dict[str, float]:
        """Measure the episode as if it ended now."""
        # Nothing says which passages are gold. v0 has counted them as found, and so do its results.
        return super().metrics() | {"gold_passage_recall": 1.0}
