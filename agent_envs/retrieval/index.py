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
            DataError: If it is missing, damaged, or not an index; names the file.
        """
        self._folder = Path(folder).absolute()
        path = self._folder / _DESCRIPTION
        try:
            description = dict(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise _not_an_index(path, error) from None
        if {name: description.get(name) for name in _KIND} != _KIND:
            raise _not_an_index(path, f"{description} is another kind than {_KIND}")
        starts, passages, weights = (_array(self._folder / f"{name}.npy") for name in _ARRAYS)
        texts, words = _Strings(self._folder / "texts"), _Strings(self._folder / "words")
        postings = Postings(
            words=(), number=words.number, starts=starts, passages=passages, weights=weights
        )
        super().__init__(cast("Sequence[Passage]", _SavedPassages(texts)), postings)

    def __reduce__(self) -> tuple[type["SavedIndex"], tuple[Path]]:
        """Pickle and copy by path."""
        return SavedIndex, (self._folder,)


def _not_an_index(path: Path, reason: object) -> DataError:
    return DataError(
        f"{path} is not of an index, or damaged: {reason}. Write an index with "
        "`python -m agent_envs.retrieval CORPUS FOLDER`."
    )


def _array(path: Path) -> npt.NDArray[Any]:
    """Map an array; not as ``memmap``, whose slices cost microseconds."""
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise _not_an_index(path, error) from error


class _Strings:
    """Encoded strings, concatenated in a file."""

    def __init__(self, path: Path) -> None:
        starts, file = _array(path.with_suffix(".npy")), path.with_suffix(".bin")
        size = file.stat().st_size if file.is_file() else -1
        if starts.ndim != 1 or size != starts[-1]:
            raise _not_an_index(file, f"it has {size} bytes")
        data: Any = np.memmap(file, mode="r") if size else b""
        self._data, self._starts = (
            memoryview(data),
            memoryview(cast("Any", starts)),
        )  # fast to slice

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
