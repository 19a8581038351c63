"""Base of the question-answering data sets: passages to search and read, evidence to cite."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent_envs import scoring
from agent_envs.core.lookup import lookup
from agent_envs.core.rewards import NOTHING, final_metric
from agent_envs.core.tasks import Task
from agent_envs.core.tool import DEFAULT_TIMEOUT_SECONDS
from agent_envs.core.tool_env import NewConversation
from agent_envs.data.dataset_env import DatasetEnv
from agent_envs.data.sources import DatasetSpec, Source, file_source
from agent_envs.envs.qa.injection import TASK_PREFIX, VARIANTS
from agent_envs.envs.qa.retrieval import RetrievalQAEnv
from agent_envs.envs.qa.rows import QARow
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval import (
    Corpus,
    Page,
    Passage,
    RetrievalClient,
    Retriever,
    SavedIndex,
    build_retriever,
    load_passages,
)
from agent_envs.retrieval.bm25 import BM25Retriever
from agent_envs.tools.notebook import Note, Notebook
from agent_envs.tools.pages import PageReader
from agent_envs.tools.search import make_search_tool

_CITATION_TERMS: Final = {name: final_metric(name) for name in ("supporting_fact_f1", "joint_f1")}


class PassageQAEnv(RetrievalQAEnv, DatasetEnv):
    """Questions of a data set, over the passages of all its rows and of `corpus` files.

    Tool: ``search(query)``. By name in ``tools=``: ``"read"`` (``read(title)``, sentences with
    their numbers), ``"find_in_page"``, ``"note"`` (``note``, ``drop_note``: a numbered list of
    evidence that is part of every state) and ``"plan"``. With ``"note"``, notes with a title and a
    sentence cite supporting facts, which metrics compare with the gold ones where the data set has
    any.

    Reward terms: those of `RetrievalQAEnv`; ``supporting_fact_f1`` and ``joint_f1`` at the end
    (outcome), which need the tool ``"note"``. The episode ends with an answer.
    """

    dataset: DatasetSpec[QARow]
    optional_tool_names = ("read", "find_in_page", "note", "plan")
    reward_functions = {**RetrievalQAEnv.reward_functions, **_CITATION_TERMS}
    outcome_terms = RetrievalQAEnv.outcome_terms | set(_CITATION_TERMS)
    not_in_snapshots = frozenset({"_engine", "_reader"})

    def __init__(
        self,
        *,
        corpus: str | Sequence[str] = (),
        top_k: int = 5,
        retriever: str | Retriever = "auto",
        variant: str = "default",
        **shared: Any,
    ) -> None:
        """Load tasks and passages; both are shared between environments of one process.

        Args:
            corpus: Files of more passages (title, text) to search.
            top_k: Maximal number of passages per search.
            retriever: ``"bm25"`` (also ``"auto"``) or ``"rank_bm25"`` over all passages, or
                instead of them the folder of a saved index, the URL of a retrieval server, or a
                `Retriever`.
            variant: ``"default"``, or ``"injected"``: passages contain planted instructions, forged
                answers and results, and role markers; see `agent_envs.envs.qa.injection`.
            shared: Arguments of `DatasetEnv`.
        """
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        if not isinstance(retriever, str) and not hasattr(retriever, "search"):
            raise ConfigurationError(
                f"retriever= takes a name or a `Retriever`, not {retriever!r}."
            )
        self._corpus = (corpus,) if isinstance(corpus, str) else tuple(corpus)
        self._engine, self._top_k = retriever, top_k
        self.is_injected = lookup(VARIANTS, variant, kind="variant")
        self._reader, self._notebook = PageReader(self._show_page), Notebook()
        is_local = isinstance(retriever, BM25Retriever) or (
            isinstance(retriever, str) and not _is_url(retriever)
        )
        search = make_search_tool(
            self,
            top_k=top_k,
            show=self.show_passage,
            timeout=None if is_local else DEFAULT_TIMEOUT_SECONDS,
            stateful=self.is_injected,
        )
        super().__init__(
            default_tools=[search],
            optional_tools=self._reader.tools | self._notebook.tools,
            **shared,
        )
        if "note" not in self.tools and (terms := _CITATION_TERMS.keys() & self.reward_weights):
            raise ConfigurationError(
                f"rewards: {min(terms)!r} scores the facts that are cited in notes; pass "
                "tools=['note'] as well."
            )

    def load_tasks(self, source: Source) -> Sequence[Task]:
        files = tuple(map(file_source, self._corpus))
        library = load_library(self.dataset, source, files)
        self._reader.take(library.pages)
        self.retriever = (
            _load_retriever(self.dataset, source, files, self._engine)
            if isinstance(self._engine, str)
            else self._engine
        )
        return library.tasks

    def get_task(self, index: int) -> Task:
        task = super().get_task(index)
        return replace(task, id=f"{TASK_PREFIX}{task.id}") if self.is_injected else task

    def begin_episode(self) -> None:
        super().begin_episode()
        self._reader.close()
        self._notebook.clear()

    def on_answer(self, answer: str) -> NewConversation | None:
        following = super().on_answer(answer)
        if self.noted["exact_match"] and self.gold_keys():
            self.noted["new_gold_passage"] = self._progress.advance(1.0)
        return following

    def _show_page(self, page: Page) -> Page:
        text = self.planted_text(page.passage)
        return page if text is None else replace(page, sentences=(*page.sentences, text))

    def pinned_text(self) -> str:
        return self._notebook.text

    def gold_keys(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(self.passage_key, self._gold())))

    def _gold(self) -> list[Passage]:
        return [Passage(title, text) for title, text in self.task.data.get("gold", ())]

    def metrics(self) -> dict[str, float]:
        measured = super().metrics()
        return measured | self._citation_metrics(measured["exact_match"])

    def _citation_metrics(self, answer_match: float) -> dict[str, float]:
        """Compare the cited facts with the gold ones, as the data sets' own scripts do."""
        if "note" not in self.tools or "supporting_facts" not in self.task.data:
            return {}
        scores = self.score_citations(list(self._notebook.notes.values()))
        measured: dict[str, float] = {}
        answers = [scoring.answer_overlap(self.answer or "", gold) for gold in self.task.answers]
        joint, joint_match = [scoring.best_overlap(answers)], answer_match
        for name, (overlap, match) in scores.items():
            measured |= {f"{name}_em": match, f"{name}_f1": overlap.f1}
            joint.append(overlap)
            joint_match *= match
        return measured | {"joint_em": joint_match, "joint_f1": scoring.joint_overlap(*joint).f1}

    def score_citations(self, notes: Sequence[Note]) -> dict[str, tuple[scoring.Overlap, float]]:
        """Return overlap and exact match of citations by kind, as HotpotQA's script does."""
        facts = {note.fact for note in notes if note.fact is not None}
        gold = self.task.data["supporting_facts"]
        return {
            "supporting_fact": (scoring.set_overlap(facts, gold), scoring.set_match(facts, gold))
        }

    def reference_actions(self) -> list[str]:
        """Search each gold passage, cite it if turns are left, and answer."""
        queries = dict.fromkeys(map(self._query_for, self._gold()))
        actions = [self.write_call("search", query=query) for query in queries if query]
        notes: list[str] = []
        if "note" in self.tools:
            notes += [
                self.write_call("note", text=f"{title}, {sentence}", title=title, sentence=sentence)
                for title, sentence in self.task.data.get("supporting_facts", ())
            ]
            triples = self.task.data.get("evidences", ())
            notes += [self.write_call("note", text=" | ".join(triple)) for triple in triples]
        if self.max_turns is None or len(actions) + len(notes) < self.max_turns:
            actions += notes
        return [*actions, self.write_answer(self.task.answers[0])]

    def _query_for(self, gold: Passage) -> str:
        """Return a query that finds a passage: its title, or more of its words if necessary."""
        key, title, text = self.passage_key(gold), gold.title, gold.text
        for query in (title, f"{title} {text[:200]}", f"{title} {text}"):
            hits = self.search(query, self._top_k)
            if any(self.passage_key(hit.passage) == key for hit in hits):
                return query
        return title


class UnmarkedQAEnv(PassageQAEnv):
    """Questions of a data set whose rows name no gold passages."""

    metric_names = tuple(n for n in PassageQAEnv.metric_names if n != "gold_passage_recall")
    term_earnings = {**PassageQAEnv.term_earnings, "new_gold_passage": NOTHING}


class _Library(NamedTuple):
    tasks: tuple[Task, ...]
    corpus: Corpus
    pages: Mapping[str, tuple[Page, ...]]
    """The pages of each title."""


@lru_cache(maxsize=8)
def load_library(
    dataset: DatasetSpec[QARow], source: Source, files: tuple[Source, ...]
) -> _Library:
    """Load tasks and pages of a source, and the passages of `files` as pages of one sentence."""
    rows = dataset.read_all(source)
    passages = [passage for file in files for passage in load_passages(file.name)]
    pages = dict.fromkeys(page for row in rows for page in row.pages)
    pages |= dict.fromkeys(Page(passage.title, (passage.text,)) for passage in passages)
    by_title: dict[str, tuple[Page, ...]] = {}
    for page in pages:
        known = by_title.get(page.title, ())
        if all(page.passage != other.passage for other in known):
            by_title[page.title] = (*known, page)
    corpus = Corpus(page.passage for page in pages)
    return _Library(tuple(row.task for row in rows), corpus, by_title)


@lru_cache(maxsize=8)
def _load_retriever(
    dataset: DatasetSpec[QARow], source: Source, files: tuple[Source, ...], name: str
) -> Retriever:
    """Connect to a server, open the index in a folder, or index the passages of a library."""
    if _is_url(name):
        client = RetrievalClient(name)
        client.check()
        return client
    if Path(name).is_dir():
        return SavedIndex(name)
    return build_retriever(load_library(dataset, source, files).corpus, name)


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))
