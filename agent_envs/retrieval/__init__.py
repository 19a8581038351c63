"""Passages and search engines over them."""

from agent_envs.retrieval.bm25 import RETRIEVERS, STOP_WORDS, build_retriever, query_words
from agent_envs.retrieval.client import RetrievalClient
from agent_envs.retrieval.corpus import Corpus, Hit, Page, Passage, Retriever, load_passages
from agent_envs.retrieval.index import SavedIndex, save_index

__all__ = [
    "RETRIEVERS",
    "STOP_WORDS",
    "Corpus",
    "Hit",
    "Page",
    "Passage",
    "RetrievalClient",
    "Retriever",
    "SavedIndex",
    "build_retriever",
    "load_passages",
    "query_words",
    "save_index",
]
