"""A BM25 index in a folder: built once, opened in milliseconds, shared by all processes.

::

    python -m agent_envs.retrieval passages.jsonl.gz index

Index and passages are memory-mapped, so the operating system keeps one copy of what is read. A
search finds the same passages as `build_retriever`.
"""

import bisect
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
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
_FILES: Final = (
    *(f"{name}.npy" for name in (*_ARRAYS, "words", "texts")), "words.bin", "texts.bin",
)  # fmt: skip
_CODEC: Final = ("utf-8", "surrogatepass")  # JSON may contain half of a surrogate pair
_ADVICE: Final = "Write it with `python -m agent_envs.retrieval CORPUS FOLDER`."


def save_index(corpus: Corpus, folder: str | Path) -> None:
    """Write index and passages to a new folder, atomically.

    Raises:
        ConfigurationError: If the folder exists and is not empty.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigurationError(f"{folder} exists already: name another folder, or delete it.")
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        _write(corpus.passages, temporary)
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
        _check(self._folder)
        starts, passages, weights = (_array(self._folder / f"{name}.npy") for name in _ARRAYS)
        self.passages = cast("Sequence[Passage]", _SavedPassages(_Strings(self._folder, "texts")))
        postings = Postings(
            words=_SortedWords(_Strings(self._folder, "words")),
            starts=starts, passages=passages, weights=weights, num_passages=len(self.passages),
        )  # fmt: skip
        super().__init__(self.passages, postings)

    @property
    def fingerprint(self) -> str:
        """Digest of the lengths of all passages, which identifies the corpus."""
        return hashlib.sha256((self._folder / "texts.npy").read_bytes()).hexdigest()

    def __reduce__(self) -> tuple[type["SavedIndex"], tuple[Path]]:
        """Pickle and copy by path."""
        return SavedIndex, (self._folder,)


def _write(passages: tuple[Passage, ...], folder: Path) -> None:
    postings = build_postings(map(words_of, passages))
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(postings, name))
    _write_strings(folder, "words", postings.words)
    _write_strings(folder, "texts", (part for p in passages for part in (p.title, p.text)))
    files = sorted(folder.iterdir())
    description = {**_KIND, "bytes": {path.name: path.stat().st_size for path in files}}
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    for path in (*files, folder / _DESCRIPTION):
        fsync_file(path)


def _check(folder: Path) -> None:
    """Raise `DataError` unless the folder is a complete index of this version."""
    try:
        description: Any = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        kind = {name: description[name] for name in _KIND}
        sizes = dict(description["bytes"])
    except OSError as error:
        reason = f"{error.strerror}: {_DESCRIPTION}"
        raise DataError(f"{folder} is not an index: {reason}. {_ADVICE}") from None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{folder / _DESCRIPTION} is not valid. {_ADVICE}") from None
    if kind != _KIND:
        raise DataError(f"{folder} is an index of another kind: {kind}, not {_KIND}. {_ADVICE}")
    for name in _FILES:
        path = folder / name
        size = path.stat().st_size if path.is_file() else "no"
        if size != sizes.get(name):
            expected = sizes.get(name)
            raise DataError(f"{path} is damaged: {size} bytes instead of {expected}. {_ADVICE}")


def _array(path: Path) -> npt.NDArray[Any]:
    """Map an array; not as ``memmap``, whose slices cost microseconds."""
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}. {_ADVICE}") from error


def _write_strings(folder: Path, name: str, strings: Iterable[str]) -> None:
    starts = [0]
    with (folder / f"{name}.bin").open("wb") as file:
        for string in strings:
            starts.append(starts[-1] + file.write(string.encode(*_CODEC)))
    np.save(folder / f"{name}.npy", np.array(starts, np.int64))


class _Strings:
    """Encoded strings, concatenated in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.bin"
        data: Any = np.memmap(path, mode="r") if path.stat().st_size else b""
        starts: Any = _array(folder / f"{name}.npy")
        self._data, self._starts = memoryview(data), memoryview(starts)  # fast to slice

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._data[self._starts[index] : self._starts[index + 1]])


class _SortedWords:
    """The `Numbering` of a saved index, searched by bisection."""

    def __init__(self, words: _Strings) -> None:
        self._words = words

    def __iter__(self) -> Iterator[str]:
        return (self._words[i].decode(*_CODEC) for i in range(len(self._words)))

    def get(self, word: str, /) -> int | None:
        encoded = word.encode(*_CODEC)  # UTF-8 sorts by code points
        number = bisect.bisect_left(self._words, encoded)
        return number if number < len(self._words) and self._words[number] == encoded else None


class _SavedPassages:
    """Passages, decoded on access."""

    def __init__(self, parts: _Strings) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts) // 2

    def __getitem__(self, index: int) -> Passage:
        number = 2 * range(len(self))[index]  # IndexError ends an iteration
        title, text = self._parts[number], self._parts[number + 1]
        return Passage(title.decode(*_CODEC), text.decode(*_CODEC))
