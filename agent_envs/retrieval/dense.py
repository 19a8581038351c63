"""Dense retrieval: passages by the cosine of their embeddings and the query's.

sentence-transformers makes the embeddings, faiss searches them. Both are imported only here, for
the commands ``embed`` and ``serve``; environments use the server.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import require_extra
from agent_envs.data.files import atomic_path, fsync_file, write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.corpus import Hit, check_top_k
from agent_envs.retrieval.index import SavedIndex

SHARD: Final = 16_384
"""Passages per file of embeddings; an interrupted `embed_index` resumes after the last file."""
_KIND: Final = {"format": "agent-envs dense index", "version": 1}
_DESCRIPTION: Final = "dense.json"
_VECTORS: Final = "vectors.faiss"
_NUM_SPARE: Final = 16
"""Additional candidates, so that ties at the last rank are ordered by number."""


def embed_index(
    index: SavedIndex,
    folder: str | Path,
    *,
    model: str,
    query_prefix: str = "",
    passage_prefix: str = "",
    kind: str = "Flat",
) -> None:
    """Embed the passages of an index into a new folder, atomically.

    An interrupted call leaves its embeddings in a hidden folder, from which the next call resumes.

    Args:
        index: The passages.
        folder: Where to write; must be new.
        model: For sentence-transformers: a folder, or a name on the hub.
        query_prefix: Text before each query, such as ``"query: "`` for E5.
        passage_prefix: Text before each passage, such as ``"passage: "``.
        kind: For ``faiss.index_factory``: ``"Flat"`` is exact, ``"HNSW64"`` fast and approximate.

    Raises:
        ConfigurationError: If `folder` exists, or faiss has no such kind.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: name another folder, or delete it.")
    description = {
        **_KIND, "model": model, "query_prefix": query_prefix, "passage_prefix": passage_prefix,
        "kind": kind, "passages": len(index.passages), "corpus": index.fingerprint,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]
    partial = folder.with_name(f".{folder.name}.{digest}")
    partial.mkdir(parents=True, exist_ok=True)
    faiss, encode = _libraries(model)
    vectors = None
    for start in range(0, len(index.passages), SHARD):
        path = partial / f"{start}.npy"
        if not path.exists():
            part = [
                index.passages[i] for i in range(start, min(start + SHARD, len(index.passages)))
            ]
            with atomic_path(path) as temporary:
                np.save(temporary, encode([f"{passage_prefix}{p.title}\n{p.text}" for p in part]))
        shard = np.load(path)
        if vectors is None:
            try:
                vectors = faiss.index_factory(shard.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
            except RuntimeError as error:
                raise ConfigurationError(f"faiss has no index kind {kind!r}: {error}") from error
            vectors.train(shard)
        vectors.add(shard)
    faiss.write_index(vectors, str(partial / _VECTORS))
    fsync_file(partial / _VECTORS)
    write_json(partial / _DESCRIPTION, description)
    for path in partial.glob("*.npy"):
        path.unlink()
    partial.replace(folder)


class DenseIndex:
    """Searches a folder that `embed_index` wrote; the score is the cosine, above 0."""

    def __init__(self, index: SavedIndex, folder: str | Path) -> None:
        """Open the embeddings of `index`.

        Raises:
            DataError: If the folder is missing, damaged, or made from other passages; names the
                file.
        """
        path = Path(folder) / _DESCRIPTION
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            is_known = {name: description.get(name) for name in _KIND} == _KIND
            faiss, self._encode = _libraries(description["model"])
            # Memory-mapped like the passages.
            self._vectors = faiss.read_index(str(path.parent / _VECTORS), faiss.IO_FLAG_MMAP_IFC)
        except (OSError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise DataError(f"{folder} is not a dense index: {error}") from error
        if not is_known or description.get("corpus") != index.fingerprint:
            raise DataError(
                f"{path} has embeddings of other passages than those of the index. Make them with "
                "`python -m agent_envs.retrieval embed INDEX FOLDER`."
            )
        self._passages, self._query_prefix = index.passages, description["query_prefix"]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        return self.search_many([query], top_k)[0]

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Search for all `queries` in one batch."""
        check_top_k(top_k)
        num_candidates = min(top_k + _NUM_SPARE, len(self._passages))
        if not queries or not num_candidates:
            return [[] for _ in queries]
        vectors = self._encode([self._query_prefix + query for query in queries])
        scores, numbers = self._vectors.search(vectors, num_candidates)
        # Rounded as in BM25: the last bits depend on the other queries of a batch.
        rounded = np.round(scores.astype(float), 4).tolist()
        return [
            self._hits(values, indices, top_k) if query.strip() else []
            for query, values, indices in zip(queries, rounded, numbers.tolist(), strict=True)
        ]

    def _hits(self, scores: Sequence[float], numbers: Sequence[int], top_k: int) -> list[Hit]:
        pairs = zip(scores, numbers, strict=True)
        # faiss fills up with -1 if it finds fewer
        best = sorted((-score, i) for score, i in pairs if score > 0 and i >= 0)[:top_k]
        return [Hit(self._passages[i], i, -value) for value, i in best]


def _libraries(model: str) -> tuple[Any, Callable[[Sequence[str]], npt.NDArray[np.float32]]]:
    """Return faiss, and a function from texts to vectors of length 1, shape (texts, size)."""
    require_extra("dense", "Dense retrieval", "faiss", "sentence_transformers")
    import faiss
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model)

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors = encoder.encode(clean, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    return faiss, encode
