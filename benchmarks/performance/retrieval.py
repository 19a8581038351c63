"""What retrieval costs, by engine and by size of the corpus.

Each engine builds its index in a process of its own, saves it if it can, and answers the same
questions in two further processes that are there at the same time.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from agent_envs.retrieval import STOP_WORDS, Corpus, Passage, SavedIndex, save_index
from agent_envs.retrieval.bm25 import tokenize, words_of

TOP_K: Final = 5
ENGINES: Final = ("ours", "bm25s", "rank_bm25")
LARGEST_FOR_RANK_BM25: Final = 200_000
"""It looks at every passage for every word, and cannot be saved."""

Search = Callable[[str], object]
_open_here: list[Search] = []


def pad(passages: Sequence[Passage], size: int) -> Iterator[Passage]:
    """Yield `size` distinct passages: first those that are real, then the same with words shuffled.

    So word frequencies and lengths are those of real text.
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
    """Return the figures of each engine at a size; None where it cannot do it."""
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
            results[engine] = _in_process(_build, engine, corpus, index, questions)
            if engine != "rank_bm25":
                results[engine] |= _serve(engine, index, questions)
    return results


def _in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with _new_process() as process:
        return process.submit(function, *arguments).result()


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def _serve(engine: str, index: Path, questions: Sequence[str]) -> dict[str, Any]:
    """Answer in two processes at once; return the figures of the first."""
    with _new_process() as first, _new_process() as second:
        first.submit(_answer, engine, index, questions).result()  # reads the files from the disk
        return second.submit(_answer, engine, index, questions).result()


def _build(
    engine: str, corpus: Path, index: Path, questions: Sequence[str]
) -> dict[str, float | None]:
    with corpus.open(encoding="utf-8") as file:
        passages = [Passage(*json.loads(line)) for line in file]
    started = time.perf_counter()
    if engine == "ours":
        save_index(Corpus(passages), index)
        return {"build and save, s": time.perf_counter() - started}
    numbers: dict[str, int] = {}
    documents = [
        [numbers.setdefault(word, len(numbers)) for word in words_of(passage)]
        for passage in passages
    ]  # of shared objects: words as strings would not fit into memory
    if engine == "bm25s":
        import bm25s
        from bm25s.tokenization import Tokenized

        bm25 = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        bm25.index(Tokenized(ids=documents, vocab=numbers), show_progress=False)
        texts = [{"title": passage.title, "text": passage.text} for passage in passages]
        bm25.save(index, corpus=texts, show_progress=False)
        return {"build and save, s": time.perf_counter() - started}
    import rank_bm25

    before = psutil.Process().memory_info().rss
    okapi = rank_bm25.BM25Okapi(documents)
    seconds = time.perf_counter() - started

    def search(question: str) -> object:
        return okapi.get_top_n([numbers.get(w, -1) for w in _words(question)], passages, TOP_K)

    return {
        "build and save, s": seconds,
        "open, ms": None,
        **_times(search, questions[:3]),
        "memory of a process, MB": (psutil.Process().memory_info().rss - before) / 1e6,
    }


def _answer(engine: str, index: Path, questions: Sequence[str]) -> dict[str, float]:
    """Open an index, answer questions, and keep it open.

    The memory is what this has added to the process, without what it shares with another one.
    """
    import bm25s

    process = psutil.Process()
    before = process.memory_full_info().uss
    started = time.perf_counter()
    search: Search
    if engine == "ours":
        saved = SavedIndex(index)
        search = lambda question: saved.search(question, TOP_K)  # noqa: E731
    else:
        bm25 = bm25s.BM25.load(index, mmap=True, load_corpus=True, show_progress=False)
        search = lambda question: bm25.retrieve(  # noqa: E731
            [_words(question)], k=TOP_K, show_progress=False
        )
    seconds = time.perf_counter() - started
    times = _times(search, questions)
    own = (process.memory_full_info().uss - before) / 1e6
    _open_here.append(search)
    return {"open, ms": seconds * 1e3, **times, "memory of a process, MB": own}


def _words(question: str) -> list[str]:
    return [word for word in tokenize(question) if word not in STOP_WORDS]


def _times(search: Search, questions: Sequence[str]) -> dict[str, float]:
    """Return the mean over questions of the best of several times: others use the machine, too."""
    taken = []
    for question in questions:
        times = []
        for _ in range(5 if len(questions) > 10 else 1):
            started = time.perf_counter()
            search(question)
            times.append(time.perf_counter() - started)
        taken.append(min(times))
    return {"query, ms": statistics.fmean(taken) * 1e3}
