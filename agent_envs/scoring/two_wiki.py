"""Supporting facts and evidence as version 1.1 of 2WikiMultihopQA's script scores them.

``2wikimultihop_evaluate_v1.1.py`` (github.com/Alab-NII/2wikimultihop): titles count in any case;
subjects and objects of evidence may be named by any alias; articles of evidence stay.
"""

import gzip
import json
import string
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from agent_envs.errors import DataError
from agent_envs.scoring.answers import Overlap

_PUNCTUATION = str.maketrans("", "", string.punctuation)
Fact = tuple[str, int]
Aliases = Mapping[str, tuple[str, ...]]
"""Id of a Wikidata entity -> other names."""


class GoldEvidence(NamedTuple):
    """A triple, with aliases of its subject and object."""

    triple: tuple[str, str, str]
    subjects: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()


def score_facts(predicted: Collection[Fact], gold: Collection[Fact]) -> tuple[Overlap, float]:
    """Return overlap and exact match of supporting facts, titles in any case."""
    cited = [(title.lower(), sentence) for title, sentence in set(predicted)]
    wanted = [(title.lower(), sentence) for title, sentence in set(gold)]
    num_right = sum(fact in wanted for fact in cited)
    num_missing = sum(fact not in cited for fact in wanted)
    overlap = Overlap(
        num_right / len(cited) if cited else 0.0,
        num_right / (num_right + num_missing) if num_right + num_missing else 0.0,
    )
    return overlap, float(num_right == len(cited) and not num_missing)


def score_evidence(
    predicted: Iterable[Sequence[str]], gold: Sequence[GoldEvidence]
) -> tuple[Overlap, float]:
    """Return overlap and exact match of evidence.

    As in the script, each triple that fits some gold one counts, so recall is above 1 where one
    gold triple is written several times under aliases.
    """
    written = {tuple(map(normalize_evidence, triple)) for triple in predicted}
    wanted = [
        [set(map(normalize_evidence, names)) for names in ((s, *subjects), (r,), (o, *objects))]
        for (s, r, o), subjects, objects in gold
    ]
    num_right = sum(
        any(all(part in names for part, names in zip(triple, each, strict=True)) for each in wanted)
        for triple in written
    )
    overlap = Overlap(num_right / max(1, len(written)), num_right / max(1, len(gold)))
    return overlap, float(num_right == len(written) == len(gold))


def normalize_evidence(text: str) -> str:
    """Lower the case, remove ASCII punctuation, then extra white space; articles stay."""
    return " ".join(text.lower().translate(_PUNCTUATION).split())


@lru_cache(maxsize=2)
def load_aliases(path: str, size: int, modified_ns: int) -> Aliases:
    """Read the official ``id_aliases.json`` (also ``.gz``): a JSON object a line.

    Args:
        path: The file; each line has ``Q_id``, ``aliases`` and ``demonyms``.
        size: Its size and `modified_ns`, its time, tell a changed file from an old one.
        modified_ns: See `size`.

    Raises:
        DataError: If it cannot be read; names file, row and field.
    """
    try:
        data = Path(path).read_bytes()
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}). Pass id_aliases.json.") from None
    return dict(
        _read_aliases(line, f"{path}, row {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    )


def _read_aliases(line: str, place: str) -> tuple[str, tuple[str, ...]]:
    try:
        row: Any = json.loads(line)
        names = dict.fromkeys(map(str, [*row["aliases"], *row["demonyms"]]))
        return str(row["Q_id"]), tuple(names)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{place}: is no row of aliases ({type(error).__name__}: {error}). It needs 'Q_id', "
            "'aliases' and 'demonyms', as in the official id_aliases.json."
        ) from None
