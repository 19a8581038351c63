"""A BM25 index in a folder: built once, opened in milliseconds, shared by every process.

::

    python -m agent_envs.retrieval passages.jsonl.gz index

Everything is memory-mapped, the passages too: a process reads what its queries touch, and the
operating system holds that once for all of them. A search finds what it would find with
`build_retriever` over the same passages.
"""

import bisect
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from agent_envs.data.files import settle
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval.bm25 import BM25Retriever, words_of
from agent_envs.retrieval.corpus import Corpus, Passage
from agent_envs.retrieval.postings import K1, B, Postings, build_postings

_DESCRIPTION: Final = "index.json"
_KIND: Final = {"format": "agent-envs BM25 index", "version": 1, "k1": K1, "b": B}
_ARRAYS: Final = ("starts", "passages", "weights")
_CODEC: Final = ("utf-8", "surrogatepass")  # which keeps half a surrogate pair, as JSON may hold


def save_index(corpus: Corpus, folder: str | Path) -> None:
    """Index a corpus; write index and passages to a new folder, whole or not at all.

    Raises:
        ConfigurationError: If something is there already.
    """
    folder = Path(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigurationError(
            f"{folder} exists already, and an index is written to a new folder: name another one, "
            "or delete this one first."
        )
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        _write(corpus.passages, temporary)
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class SavedIndex(BM25Retriever):
    """Searches a folder that `save_index` wrote. A pickle of it holds no more than the path."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder.

        Raises:
            DataError: If it is missing, holds something else, or is damaged; names the file.
        """
        self._folder = Path(folder).absolute()
        _check(self._folder)
        starts, passages, weights = (_array(self._folder / f"{name}.npy") for name in _ARRAYS)
        self.passages = _SavedPassages(_Strings(self._folder, "texts"))
        postings = Postings(
            words=_SortedWords(_Strings(self._folder, "words")),
            starts=starts, passages=passages, weights=weights, num_passages=len(self.passages),
        )  # fmt: skip
        super().__init__(self.passages, postings)

    @property
    def fingerprint(self) -> str:
        """Tells these passages from others: a digest of how long each is."""
        return hashlib.sha256((self._folder / "texts.npy").read_bytes()).hexdigest()

    def __reduce__(self) -> tuple[type["SavedIndex"], tuple[Path]]:
        """Pickle, and copy, by path."""
        return SavedIndex, (self._folder,)


def _write(passages: Sequence[Passage], folder: Path) -> None:
    postings = build_postings(map(words_of, passages))
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(postings, name))
    _write_strings(folder, "words", postings.words)
    _write_strings(folder, "texts", (part for p in passages for part in (p.title, p.text)))
    files = sorted(folder.iterdir())
    description = {**_KIND, "bytes": {path.name: path.stat().st_size for path in files}}
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=2), encoding="utf-8")
    for path in (*files, folder / _DESCRIPTION):
        settle(path)


def _check(folder: Path) -> None:
    """Raise `DataError` unless the folder is a whole index of this version."""
    advice = "Write it with `python -m agent_envs.retrieval CORPUS FOLDER`."
    try:
        description: Any = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        kind = {name: description[name] for name in _KIND}
        sizes = dict(description["bytes"])
    except OSError as error:
        raise DataError(
            f"{folder} is no index: {error.strerror}, {_DESCRIPTION}. {advice}"
        ) from None
    except (ValueError, TypeError, KeyError):
        raise DataError(f"{folder / _DESCRIPTION} describes no index. {advice}") from None
    if kind != _KIND:
        raise DataError(f"{folder} holds an index of another kind: {kind}, not {_KIND}. {advice}")
    expected = {f"{name}.npy" for name in (*_ARRAYS, "words", "texts")} | {"words.bin", "texts.bin"}
    for name in sorted(expected):
        path = folder / name
        size = path.stat().st_size if path.is_file() else "no"
        if size != sizes.get(name):
            raise DataError(
                f"{path} is damaged: {size} bytes instead of {sizes.get(name)}. {advice}"
            )


def _array(path: Path) -> npt.NDArray[Any]:
    """Map an array; a plain one, since each slice of a ``memmap`` object costs microseconds."""
    try:
        return np.asarray(np.load(path, mmap_mode="r"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _write_strings(folder: Path, name: str, strings: Iterable[str]) -> None:
    starts = [0]
    with (folder / f"{name}.bin").open("wb") as file:
        for string in strings:
            starts.append(starts[-1] + file.write(string.encode(*_CODEC)))
    np.save(folder / f"{name}.npy", np.array(starts, np.int64))


class _Strings(Sequence[bytes]):
    """Encoded strings, one after the other in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        path = folder / f"{name}.bin"
        data: Any = np.memmap(path, mode="r") if path.stat().st_size else b""
        starts: Any = _array(folder / f"{name}.npy")
        self._data, self._starts = memoryview(data), memoryview(starts)  # quick to slice

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return bytes(self._data[self._starts[index] : self._starts[index + 1]])


class _SortedWords:
    def __init__(self, words: _Strings) -> None:
        self._words = words

    def __iter__(self) -> Iterator[str]:
        return (word.decode(*_CODEC) for word in self._words)

    def get(self, word: str, /) -> int | None:
        encoded = word.encode(*_CODEC)  # UTF-8 sorts as its code points do
        number = bisect.bisect_left(self._words, encoded)
        return number if number < len(self._words) and self._words[number] == encoded else None


class _SavedPassages(Sequence[Passage]):
    """Passages, decoded as they are asked for."""

    def __init__(self, parts: _Strings) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts) // 2

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        title, text = self._parts[2 * number : 2 * number + 2]
        return Passage(title.decode(*_CODEC), text.decode(*_CODEC))
