"""Costs of retrieval by engine and size of the corpus.

Each engine builds its index in its own process, saves it if it can, and answers the same questions
in two further processes at the same time.
"""

import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from agent_envs.retrieval import STOP_WORDS, Corpus, Passage, SavedIndex, save_index
from agent_envs.retrieval.bm25 import tokenize, words_of
from benchmarks.performance.interleaved import seconds_of

TOP_K: Final = 5
ENGINES: Final = ("ours", "bm25s", "rank_bm25")
LARGEST_FOR_RANK_BM25: Final = 200_000
"""It scores every passage for every word, and cannot be saved."""
_MEMORY: Final = "memory of a process, MB"
Search = Callable[[str], object]
_open_here: list[Search] = []


def pad(passages: Sequence[Passage], size: int) -> Iterator[Passage]:
    """Yield `size` passages: the given ones, then copies with their words shuffled.

    Word frequencies and lengths stay those of real text.
    """
    rng = np.random.default_rng(0)
    words = [np.array(passage.text.split(), object) for passage in passages]
    for number in range(size):
        passage = passages[number % len(passages)]
        if number < len(passages):
            yield passage
        else:
            shuffled = rng.permutation(words[number % len(passages)])
            yield Passage(f"{passage.title} {number}", " ".join(shuffled.tolist()))


def measure(passages: Sequence[Passage], questions: Sequence[str], size: int) -> dict[str, Any]:
    """Return the figures of each engine at a size; None where it is too slow."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="agent-envs-retrieval-") as folder:
        corpus = Path(folder) / "corpus.jsonl"
        with corpus.open("w", encoding="utf-8") as file:
            for passage in pad(passages, size):
                file.write(json.dumps([passage.title, passage.text]) + "\n")
        for engine in ENGINES:
            if engine == "rank_bm25" and size > LARGEST_FOR_RANK_BM25:
                results[engine] = None
                continue
            index = Path(folder) / engine
            with _new_process() as process:
                done = process.submit(_build, engine, corpus, index, questions)
                results[engine] = done.result()
            if engine != "rank_bm25":
                with _new_process() as first, _new_process() as second:
                    first.submit(_answer, engine, index, questions).result()
                    results[engine] |= second.submit(_answer, engine, index, questions).result()
    return results


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _build(
    engine: str, corpus: Path, index: Path, questions: Sequence[str]
) -> dict[str, float | None]:
    with corpus.open(encoding="utf-8") as file:
        passages = [Passage(*json.loads(line)) for line in file]
    if engine == "ours":
        return {"build and save, s": seconds_of(lambda: save_index(Corpus(passages), index))}
    numbers: dict[str, int] = {}
    documents = [
        [numbers.setdefault(word, len(numbers)) for word in words_of(passage)]
        for passage in passages
    ]  # of shared objects: words as strings would not fit into memory
    if engine == "bm25s":
        import bm25s
        from bm25s.tokenization import Tokenized

        def build() -> None:
            bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
            bm25.index(Tokenized(ids=documents, vocab=numbers), show_progress=False)
            texts = [{"title": passage.title, "text": passage.text} for passage in passages]
            bm25.save(index, corpus=texts, show_progress=False)

        return {"build and save, s": seconds_of(build)}
    import rank_bm25

    before = psutil.Process().memory_info().rss
    built: list[Any] = []
    seconds = seconds_of(lambda: built.append(rank_bm25.BM25Okapi(documents)))

    def search(question: str) -> object:
        return built[0].get_top_n([numbers.get(w, -1) for w in _words(question)], passages, TOP_K)

    return {
        "build and save, s": seconds,
        "open, ms": None,
        **_times(search, questions[:3]),
        _MEMORY: (psutil.Process().memory_info().rss - before) / 1e6,
    }


def _answer(engine: str, index: Path, questions: Sequence[str]) -> dict[str, float]:
    """Open an index, answer questions, and keep it open; memory excludes shared pages."""
    import bm25s

    process = psutil.Process()
    before = process.memory_full_info().uss
    opened: list[Any] = []
    search: Search
    if engine == "ours":
        seconds = seconds_of(lambda: opened.append(SavedIndex(index)))
        search = lambda question: opened[0].search(question, TOP_K)  # noqa: E731
    else:
        load = {"mmap": True, "load_corpus": True, "show_progress": False}
        seconds = seconds_of(lambda: opened.append(bm25s.BM25.load(index, **load)))
        search = lambda question: opened[0].retrieve(  # noqa: E731
            [_words(question)], k=TOP_K, show_progress=False
        )
    times = _times(search, questions)
    memory = (process.memory_full_info().uss - before) / 1e6
    _open_here.append(search)
    return {"open, ms": seconds * 1e3, **times, _MEMORY: memory}


def _words(question: str) -> list[str]:
    return [word for word in tokenize(question) if word not in STOP_WORDS]


def _times(search: Search, questions: Sequence[str]) -> dict[str, float]:
    """Return the mean over questions of the best of several times."""
    rounds = 5 if len(questions) > 10 else 1
    best = [min(seconds_of(search, question) for _ in range(rounds)) for question in questions]
    return {"query, ms": statistics.fmean(best) * 1e3}
