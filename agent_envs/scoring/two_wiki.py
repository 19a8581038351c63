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
from typing import NamedTuple

from agent_envs.data.sources import FileStamp
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
def load_aliases(file: FileStamp) -> Aliases:
    """Read the official ``id_aliases.json`` (also ``.gz``): a JSON object a line.

    Raises:
        DataError: If it cannot be read; names file, row and field.
    """
    names: dict[str, tuple[str, ...]] = {}
    read = gzip.open if file.path.endswith(".gz") else open
    try:
        with read(file.path, "rt", encoding="utf-8-sig") as lines:
            for row in map(json.loads, filter(str.strip, lines)):
                known = dict.fromkeys(map(str, [*row["aliases"], *row["demonyms"]]))
                names[str(row["Q_id"])] = tuple(known)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, LookupError, RecursionError) as e:
        raise DataError(
            f"{file}, row {len(names) + 1}: no row of aliases ({type(e).__name__}: {e}). It needs "
            "'Q_id', 'aliases' and 'demonyms', as in the official id_aliases.json."
        ) from None
    return names
