"""Open questions in Search-R1's row format: one fact, to be found in passages of your own.

The data sets have no passages: pass ``corpus=``. A file that mixes data sets is read too: rows
whose ``data_source`` is another one are left out.
"""

from agent_envs.envs.qa.passages import UnmarkedQAEnv
from agent_envs.envs.qa.rows import NATURAL_QUESTIONS, POP_QA, TRIVIA_QA
from agent_envs.scoring import squad_f1


class _OpenQAEnv(UnmarkedQAEnv):
    f1_rule = staticmethod(squad_f1)


class NaturalQuestionsEnv(_OpenQAEnv):
    """Natural Questions, open (Kwiatkowski et al., 2019; Lee et al., 2019) as an environment.

    Task: answer a question that people asked a search engine; any of the gold answers is right, by
    exact match as in Search-R1 (arXiv 2503.09516). Tools, rewards and metrics: see `PassageQAEnv`.
    The episode ends with an answer, or at the turn limit (5 turns unless ``max_episode_steps=``
    says otherwise). Hub: ``RUC-NLPIR/FlashRAG_datasets``, nq.

    Questions of your own need no other environment: ``data=`` takes a file of rows such as
    ``{"question": "Who directed Red Harbor?", "golden_answers": ["Ada Holm"]}``, ``corpus=`` one of
    passages such as ``{"title": "Red Harbor", "text": "A film by Ada Holm."}``.

    Version history: v0, first version.
    """

    dataset = NATURAL_QUESTIONS


class TriviaQAEnv(_OpenQAEnv):
    """TriviaQA (Joshi et al., 2017, arXiv 1705.03551) as an environment.

    Task: answer a trivia question; any alias is right, by exact match as in Search-R1 (arXiv
    2503.09516). Tools, rewards and metrics: see `PassageQAEnv`. The episode ends with an answer, or
    at the turn limit (5 turns unless ``max_episode_steps=`` says otherwise). Hub:
    ``RUC-NLPIR/FlashRAG_datasets``, triviaqa.

    Version history: v0, first version.
    """

    dataset = TRIVIA_QA


class PopQAEnv(_OpenQAEnv):
    """PopQA (Mallen et al., 2023, arXiv 2212.10511) as an environment.

    Task: answer a question about an entity, often a rare one; any alias is right, by exact match as
    in Search-R1 (arXiv 2503.09516). Tools, rewards and metrics: see `PassageQAEnv`. The episode
    ends with an answer, or at the turn limit (5 turns unless ``max_episode_steps=`` says
    otherwise). Hub: ``RUC-NLPIR/FlashRAG_datasets``, popqa.

    Version history: v0, first version.
    """

    dataset = POP_QA
