"""Passages and how to find them."""

from agent_envs.retrieval.bm25 import (
    RETRIEVERS,
    SMALL_CORPUS,
    STOP_WORDS,
    build_retriever,
    query_words,
)
from agent_envs.retrieval.corpus import Corpus, Hit, Page, Passage, Retriever, load_passages

__all__ = [
    "RETRIEVERS",
    "SMALL_CORPUS",
    "STOP_WORDS",
    "Corpus",
    "Hit",
    "Page",
    "Passage",
    "Retriever",
    "build_retriever",
    "load_passages",
    "query_words",
]
