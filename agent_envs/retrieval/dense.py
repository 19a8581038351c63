"""Dense retrieval: passages by the cosine of their embeddings and the query's.

sentence-transformers makes the embeddings; a search multiplies them all with the query's. It is
imported only here, for the commands ``embed`` and ``serve``; environments use the server.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent_envs.core.lookup import require_extra
from agent_envs.data.files import fsync_file, write_json
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.bm25 import best_scores
from agent_envs.retrieval.corpus import Hit, check_top_k
from agent_envs.retrieval.index import SavedIndex

_BATCH: Final = 16_384
"""Passages that are embedded at once."""
_KIND: Final = {"format": "agent-envs dense index", "version": 2}
_DESCRIPTION: Final = "dense.json"
_VECTORS: Final = "vectors.npy"


def embed_index(
    index: SavedIndex,
    folder: str | Path,
    *,
    model: str,
    query_prefix: str = "",
    passage_prefix: str = "",
) -> None:
    """Embed the passages of an index into a new folder, atomically.

    Args:
        index: The passages.
        folder: Where to write; must be new.
        model: For sentence-transformers: a folder, or a name on the hub.
        query_prefix: Text before each query, such as ``"query: "`` for E5.
        passage_prefix: Text before each passage, such as ``"passage: "``.

    Raises:
        ConfigurationError: If `folder` exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: name another folder, or delete it.")
    encode = _encoder(model)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        size = len(index.passages), encode([""]).shape[1]
        vectors = np.lib.format.open_memmap(
            temporary / _VECTORS, mode="w+", dtype=np.float32, shape=size
        )
        for start in range(0, size[0], _BATCH):
            part = [index.passages[i] for i in range(start, min(start + _BATCH, size[0]))]
            texts = [f"{passage_prefix}{passage.title}\n{passage.text}" for passage in part]
            vectors[start : start + len(part)] = encode(texts)
        vectors.flush()
        fsync_file(temporary / _VECTORS)
        description = {"model": model, "query_prefix": query_prefix, "corpus": index.fingerprint}
        write_json(temporary / _DESCRIPTION, _KIND | description)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class DenseIndex:
    """Searches a folder that `embed_index` wrote; the score is the cosine, above 0."""

    def __init__(self, index: SavedIndex, folder: str | Path) -> None:
        """Open the embeddings of `index`.

        Raises:
            DataError: If the folder is missing, damaged, or made from other passages; names it.
        """
        try:
            description = json.loads((Path(folder) / _DESCRIPTION).read_text(encoding="utf-8"))
            expected = _KIND | {"corpus": index.fingerprint}
            is_right = expected.items() <= description.items()
            self._vectors: Any = np.load(Path(folder) / _VECTORS, mmap_mode="r")
            self._encode = _encoder(description["model"])
        except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
            raise DataError(f"{folder} is not a dense index: {error}") from error
        if not is_right:
            raise DataError(
                f"{folder} has embeddings of other passages than those of the index. Make them "
                "with `python -m agent_envs.retrieval embed INDEX FOLDER`."
            )
        self._passages, self._query_prefix = index.passages, description["query_prefix"]

    def search(self, query: str, top_k: int) -> list[Hit]:
        """Return at most `top_k` passages, best first; see `Retriever.search`."""
        check_top_k(top_k)
        if not query.strip() or not len(self._passages):
            return []
        scores = self._vectors @ self._encode([self._query_prefix + query])[0]
        best = best_scores(scores.astype(np.float64), top_k)
        return [Hit(self._passages[i], i, value) for i, value in best]


def _encoder(model: str) -> Callable[[Sequence[str]], npt.NDArray[np.float32]]:
    """Return a function from texts to vectors of length 1, shape (texts, size)."""
    require_extra("dense", "Dense retrieval", "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model)

    def encode(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors = encoder.encode(clean, normalize_embeddings=True, show_progress_bar=False)
        return np.asarray(vectors, np.float32)

    return encode
