"""A BM25 index in a folder: built once, opened in milliseconds, shared by all processes.

Index and passages are memory-mapped, so the operating system keeps one copy of what is read. A
search finds the same passages as `build_retriever`.
"""

import bisect
import json
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from agent_envs.data.files import fsync_file
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.bm25 import K1, B, BM25Retriever, Postings, build_postings, words_of
from agent_envs.retrieval.corpus import Corpus, Passage

_DESCRIPTION: Final = "index.json"
_KIND: Final = {"format": "agent-envs BM25 index", "version": 1, "k1": K1, "b": B}
_ARRAYS: Final = ("starts", "passages", "weights")
_CODEC: Final = ("utf-8", "surrogatepass")  # JSON may contain half of a surrogate pair


def save_index(corpus: Corpus, folder: str | Path) -> None:
    """Write index and passages to a new folder, atomically.

    Raises:
        ConfigurationError: If the folder exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already: name another folder, or delete it.")
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        postings = build_postings(map(words_of, corpus.passages))
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(postings, name))
        _Strings.write(temporary / "words", postings.words)
        parts = (part for p in corpus.passages for part in (p.title, p.text))
        _Strings.write(temporary / "texts", parts)
        (temporary / _DESCRIPTION).write_text(json.dumps(_KIND), encoding="utf-8")
        for path in temporary.iterdir():
            fsync_file(path)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class SavedIndex(BM25Retriever):
    """Searches a folder that `save_index` wrote; pickled by its path."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder.

        Raises:
            DataError: If it is missing, damaged, or not an index; names it.
        """
        self._folder = Path(folder).absolute()
        try:
            description = json.loads((self._folder / _DESCRIPTION).read_text(encoding="utf-8"))
            if description != _KIND:
                raise ValueError(f"{description} is another kind than {_KIND}")
            starts, passages, weights = (_array(self._folder / name) for name in _ARRAYS)
            texts, words = _Strings(self._folder / "texts"), _Strings(self._folder / "words")
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise DataError(
                f"{self._folder} is not an index, or damaged: {error}. Write an index with "
                "`python -m agent_envs.retrieval CORPUS FOLDER`."
            ) from error
        postings = Postings(
            words=(), number=words.number, starts=starts, passages=passages, weights=weights
        )
        super().__init__(cast("Sequence[Passage]", _SavedPassages(texts)), postings)

    def __reduce__(self) -> tuple[type["SavedIndex"], tuple[Path]]:
        return SavedIndex, (self._folder,)


def _array(path: Path) -> npt.NDArray[Any]:
    """Map an array; not as ``memmap``, whose slices cost microseconds."""
    return np.asarray(np.load(path.with_suffix(".npy"), mmap_mode="r"))


class _Strings:
    """Encoded strings, concatenated in a file."""

    def __init__(self, path: Path) -> None:
        starts, file = _array(path), path.with_suffix(".bin")
        size = file.stat().st_size
        if starts.ndim != 1 or size != starts[-1]:
            raise ValueError(f"{file} has {size} bytes")
        data: Any = np.memmap(file, mode="r") if size else b""
        # memory views are fast to slice
        self._data, self._starts = memoryview(data), memoryview(cast("Any", starts))

    @staticmethod
    def write(path: Path, strings: Iterable[str]) -> None:
        starts = [0]
        with path.with_suffix(".bin").open("wb") as file:
            for string in strings:
                starts.append(starts[-1] + file.write(string.encode(*_CODEC)))
        np.save(path.with_suffix(".npy"), np.array(starts, np.int64))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._data[self._starts[index] : self._starts[index + 1]])

    def number(self, word: str) -> int | None:
        """Return the position of `word` among strings in order, by bisection."""
        encoded = word.encode(*_CODEC)  # UTF-8 sorts by code points
        found = bisect.bisect_left(self, encoded)
        return found if found < len(self) and self[found] == encoded else None


class _SavedPassages:
    """Passages, decoded on access."""

    def __init__(self, parts: _Strings) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts) // 2

    def __getitem__(self, index: int) -> Passage:
        number = 2 * range(len(self))[index]  # IndexError ends an iteration
        return Passage(*(self._parts[i].decode(*_CODEC) for i in (number, number + 1)))
