"""Question answering over several passages of Wikipedia: search, hop, answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_envs.core.tasks import Task
from agent_envs.envs.hotpotqa_data import HotpotQAData, load_hotpotqa
from agent_envs.envs.retrieval_qa import RetrievalQAEnv
from agent_envs.errors import ConfigurationError
from agent_envs.tools.search import make_search_tool

if TYPE_CHECKING:
    import datasets


class HotpotQAEnv(RetrievalQAEnv):
    """HotpotQA (Yang et al., 2018, arXiv 1809.09600) as an environment.

    Task: answer a question whose answer takes two passages. Tool: ``search(query)`` over every
    passage of the data, and of the `corpus` files. Reward: see `RetrievalQAEnv`. The episode ends
    with an answer, or at the turn limit (5 turns unless ``max_episode_steps=`` says otherwise).

    Version history: v0, first version.
    """

    def __init__(
        self,
        *,
        data: "str | datasets.Dataset | None" = None,
        split: str = "validation",
        corpus: str | Sequence[str] = (),
        top_k: int = 5,
        retriever: str = "auto",
        **shared: Any,
    ) -> None:
        """Load tasks and passages; both are shared between environments of one process.

        Args:
            data: A JSONL, JSON (also ``.gz``) or Parquet file of HotpotQA rows, in the hub's form
                or the original release's, or a ``datasets.Dataset``; the public data set on the
                hub (``hotpotqa/hotpot_qa``, distractor setting) if not given.
            split: The split, where `data` is not given.
            corpus: Files of more passages (title, text) to search.
            top_k: How many passages a search returns at most.
            retriever: The search engine; see `agent_envs.retrieval.build_retriever`.
            shared: What every tool environment takes; see `ToolEnv`.

        Raises:
            DataError: If a source is missing or malformed; names file, row and field.
            ConfigurationError: If an argument is out of range.
        """
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        files = (corpus,) if isinstance(corpus, str) else tuple(corpus)
        self._data: HotpotQAData = load_hotpotqa(data, split, files, retriever)
        self._top_k = top_k
        super().__init__(
            default_tools=[make_search_tool(self._data.retriever, top_k=top_k)], **shared
        )

    @property
    def num_tasks(self) -> int:
        """The number of rows."""
        return len(self._data.tasks)

    def get_task(self, index: int) -> Task:
        """Return the task of row `index`."""
        return self._data.tasks[index]

    def gold_keys(self) -> tuple[str, ...]:
        """Return the titles of the supporting facts."""
        titles: tuple[str, ...] = self.task.data["gold_titles"]
        return titles

    def reference_actions(self) -> list[str]:
        """Search each gold passage by its title, then give the gold answer.

        Where a title alone does not bring its passage up, the passage's own words are the query.
        """
        queries = [self._query_for(title) for title in self.gold_keys()]
        searches = [self.write_call("search", query=query) for query in queries if query]
        return [*searches, self.write_answer(self.task.answers[0])]

    def _query_for(self, title: str) -> str:
        text = self.task.data["gold_texts"].get(title, "")
        for query in (title, f"{title} {text[:200]}", f"{title} {text}"):
            hits = self._data.retriever.search(query, self._top_k)
            if any(hit.passage.title == title for hit in hits):
                return query
        return title
