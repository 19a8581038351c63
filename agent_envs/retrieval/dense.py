"""Dense retrieval: passages by the likeness of their embeddings to the query's.

Embeddings are made by sentence-transformers and searched by faiss. Both are loaded where they are
used, which is in the commands ``embed`` and ``serve``: environments ask the server.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.extras import require_extra
from agent_envs.data.files import atomic_path, settle, write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.corpus import Hit, Passage
from agent_envs.retrieval.index import SavedIndex

SHARD: Final = 16_384
"""How many passages are embedded between two files; what is written is not embedded again."""
_KIND: Final = {"format": "agent-envs dense index", "version": 1}
_DESCRIPTION: Final = "dense.json"
_VECTORS: Final = "vectors.faiss"
_SPARE: Final = 16
"""So many more are looked at than asked for, to order equal ones by number at the last rank."""


def embed_index(
    index: SavedIndex,
    folder: str | Path,
    *,
    model: str,
    query_prefix: str = "",
    passage_prefix: str = "",
    kind: str = "Flat",
) -> None:
    """Embed the passages of an index; write a new folder, whole or not at all.

    What was embedded before an interruption waits beside it, and the next call goes on from there.

    Args:
        index: What to embed.
        folder: Where to write; must be new.
        model: For sentence-transformers: a folder, or a name on the hub.
        query_prefix: Stands before each query, such as ``"query: "`` for E5.
        passage_prefix: Stands before each passage, such as ``"passage: "``.
        kind: For ``faiss.index_factory``: ``"Flat"`` is exact, ``"HNSW64"`` quick and approximate.

    Raises:
        MissingExtraError: Without the extra ``dense``.
        ConfigurationError: If something is at `folder` already, or faiss knows no such kind.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: name another folder, or delete it.")
    description = {
        **_KIND, "model": model, "query_prefix": query_prefix, "passage_prefix": passage_prefix,
        "kind": kind, "passages": len(index.passages), "corpus": index.fingerprint,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:16]
    partial = folder.with_name(f".{folder.name}.{name}")
    partial.mkdir(parents=True, exist_ok=True)
    encoder, faiss = _Encoder(description), _faiss()
    shards = [partial / f"{start}.npy" for start in range(0, len(index.passages), SHARD)]
    for number, path in enumerate(shards):
        if not path.exists():
            part = index.passages[number * SHARD : (number + 1) * SHARD]
            with atomic_path(path) as temporary:
                np.save(temporary, encoder.encode_passages(part))
    try:
        vectors = faiss.index_factory(encoder.size, kind, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ConfigurationError(f"faiss makes no index of the kind {kind!r}: {error}") from error
    for path in shards:
        shard = np.load(path)
        if not vectors.is_trained:
            vectors.train(shard)
        vectors.add(shard)
    faiss.write_index(vectors, str(partial / _VECTORS))
    settle(partial / _VECTORS)
    write_json(partial / _DESCRIPTION, description)
    for path in shards:
        path.unlink()
    partial.replace(folder)


class DenseIndex:
    """Searches a folder that `embed_index` wrote; the score is the cosine, above 0."""

    def __init__(self, index: SavedIndex, folder: str | Path) -> None:
        """Open the folder over the same passages as it was made of.

        Raises:
            MissingExtraError: Without the extra ``dense``.
            DataError: If it is missing, damaged, or of other passages; names the file.
        """
        faiss, path = _faiss(), Path(folder) / _DESCRIPTION
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            is_known = {name: description.get(name) for name in _KIND} == _KIND
            # Mapped into memory, as the passages are.
            vectors = faiss.read_index(str(path.parent / _VECTORS), faiss.IO_FLAG_MMAP_IFC)
        except (OSError, ValueError, AttributeError, RuntimeError) as error:
            raise DataError(f"{folder} is no dense index: {error}") from error
        if not is_known or description.get("corpus") != index.fingerprint:
            raise DataError(
                f"{path} describes embeddings of other passages than those of the index. Make them "
                "with `python -m agent_envs.retrieval embed INDEX FOLDER`."
            )
        self._passages, self._vectors = index.passages, vectors
        self._encoder = _Encoder(description)

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        return self.search_many([query], top_k)[0]

    def search_many(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Search for each of `queries`, all at once."""
        if top_k < 1:
            raise ConfigurationError(f"top_k must be at least 1, not {top_k}.")
        if not queries:
            return []
        num_candidates = min(top_k + _SPARE, len(self._passages))
        if not num_candidates:
            return [[] for _ in queries]
        scores, numbers = self._vectors.search(
            self._encoder.encode_queries(queries), num_candidates
        )
        # Rounded, as BM25's are: the last bits depend on what else is in a batch.
        found = zip(np.round(scores.astype(float), 4).tolist(), numbers.tolist(), strict=True)
        return [
            self._hits(query, values, indices, top_k)
            for query, (values, indices) in zip(queries, found, strict=True)
        ]

    def _hits(
        self, query: str, scores: Sequence[float], numbers: Sequence[int], top_k: int
    ) -> list[Hit]:
        if not query.strip():
            return []
        pairs = zip(scores, numbers, strict=True)
        # faiss fills up with -1 where it finds less
        best = sorted((-score, i) for score, i in pairs if score > 0 and i >= 0)[:top_k]
        return [Hit(self._passages[i], i, -value) for value, i in best]


class _Encoder:
    """A model of sentence-transformers, and what stands before its texts."""

    def __init__(self, description: dict[str, Any]) -> None:
        require_extra("dense", "Dense retrieval", "sentence_transformers")
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(description["model"])
        self._before_query: str = description["query_prefix"]
        self._before_passage: str = description["passage_prefix"]
        self.size: int = self._model.encode("").shape[-1]

    def encode_queries(self, queries: Sequence[str]) -> npt.NDArray[np.float32]:
        return self._encode([self._before_query + text for text in queries])

    def encode_passages(self, passages: Sequence[Passage]) -> npt.NDArray[np.float32]:
        return self._encode([f"{self._before_passage}{p.title}\n{p.text}" for p in passages])

    def _encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return vectors of length 1, shape (len(texts), size)."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors = self._model.encode(clean, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)


def _faiss() -> Any:
    require_extra("dense", "Dense retrieval", "faiss")
    import faiss

    return faiss
