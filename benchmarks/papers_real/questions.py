"""Training and test questions, and the passages that all rows of the table search."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers.hf_argparser import HfArg

from agent_envs.core.command_line import check_range
from agent_envs.data.files import write_json, write_text
from agent_envs.data.sources import DatasetSpec
from agent_envs.envs.qa.rows import HOTPOTQA, MUSIQUE, TWO_WIKI, QARow
from agent_envs.errors import ConfigurationError, DataError
from agent_envs.retrieval import load_passages
from agent_trainers.checkpointing.checkpoints import digest

TRAIN_ENV: Final = "AgentR1/HotpotQA-v0"
"""Reads rows of HotpotQA and of 2WikiMultihopQA, so that one run trains on both."""
TRAIN_SHARE: Final = 0.7
"""Share of a file that is given for training and for testing."""
FACTS_FILE: Final = "questions.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TestSet:
    """Held-out questions of one data set."""

    title: str
    env: str
    spec: DatasetSpec[QARow]


TEST_SETS: Final[Mapping[str, TestSet]] = {
    "hotpotqa": TestSet(title="HotpotQA", env="AgentR1/HotpotQA-v0", spec=HOTPOTQA),
    "two_wiki": TestSet(title="2Wiki", env="AgentR1/2WikiMultihopQA-v0", spec=TWO_WIKI),
    "musique": TestSet(title="MuSiQue", env="AgentR1/MuSiQue-v0", spec=MUSIQUE),
}
TRAINED_ON: Final = ("hotpotqa", "two_wiki")


@dataclass
class QuestionArguments:
    """Sources of rows, and how many are used."""

    hotpotqa_train: list[str] = HfArg(
        default_factory=list,
        help="Files of HotpotQA rows to train on; the hub's train split if none.",
    )
    hotpotqa_test: list[str] = HfArg(
        default_factory=list,
        help="Files of HotpotQA rows to test; the hub's validation split if none.",
    )
    two_wiki_train: list[str] = HfArg(
        default_factory=list,
        help="The same of 2WikiMultihopQA. Of a file that is given to train and to test, "
        f"a share of {TRAIN_SHARE} of the questions is trained on.",
    )
    two_wiki_test: list[str] = HfArg(default_factory=list, help="See above.")
    musique_test: list[str] = HfArg(
        default_factory=list, help="Files of MuSiQue rows, which are only tested: out of domain."
    )
    passages: list[str] = HfArg(
        default_factory=list, help="Files of further passages to search (title, text)."
    )
    passage_words: int = HfArg(default=40, help="Words of a passage that are kept; 0 for all.")
    num_train: int = HfArg(
        default=25_600, help="Questions to train on, at most, of each of two sets."
    )
    num_test: int = HfArg(default=200, help="Held-out questions of each set.")

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigurationError: If one is out of range.
        """
        check_range(self, "at least 1", "num_train", "num_test")
        check_range(self, "at least 0", "passage_words")


def prepare_questions(options: QuestionArguments, folder: Path) -> dict[str, Any]:
    """Write ``train.jsonl``, a file for each test set, and ``passages.jsonl``, once.

    Returns:
        Numbers of rows by set, and a digest of all files.

    Raises:
        DataError: If a source is missing or malformed.
        ConfigurationError: If no rows are left to train on, or to test.
    """
    if not (folder / FACTS_FILE).exists():
        train, test, passages = _split(options)
        _write_rows(folder / "train.jsonl", _alternating(train))
        for name, rows in test.items():
            _write_rows(folder / f"{name}.jsonl", rows)
        _write_rows(folder / "passages.jsonl", passages)
        files = [folder / f"{name}.jsonl" for name in ("train", *test, "passages")]
        write_json(
            folder / FACTS_FILE,
            {
                "train": {name: len(rows) for name, rows in train.items()},
                "test": {name: len(rows) for name, rows in test.items()},
                "passages": len(passages),
                "digest": hashlib.sha256("".join(map(digest, files)).encode()).hexdigest(),
            },
        )
    facts: dict[str, Any] = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    return facts


Rows = list[dict[str, Any]]


def _split(options: QuestionArguments) -> tuple[dict[str, Rows], dict[str, Rows], Rows]:
    """Return training and test rows by data set, and the passages of all."""
    train: dict[str, Rows] = {}
    test: dict[str, Rows] = {}
    passages: dict[tuple[str, str], None] = {}
    words = options.passage_words
    for name, test_set in TEST_SETS.items():
        test_files: list[str] = getattr(options, f"{name}_test")
        train_files: list[str] = getattr(options, f"{name}_train", [])
        tested = _read(test_set.spec, test_files, "validation", f"--{name}_test")
        trained = {}
        if name in TRAINED_ON:
            trained = _read(test_set.spec, train_files, "train", f"--{name}_train")
        if {Path(f).resolve() for f in test_files} & {Path(f).resolve() for f in train_files}:
            split = {q for q in tested.keys() & trained.keys() if _place(q) < TRAIN_SHARE}
            tested = {q: row for q, row in tested.items() if q not in split}
        trained = {q: row for q, row in trained.items() if q not in tested}
        test[name] = [_record(tested[q], words) for q in _drawn(tested, options.num_test)]
        if name in TRAINED_ON:
            train[name] = [_record(trained[q], words) for q in _drawn(trained, options.num_train)]
            if not train[name]:
                raise ConfigurationError(
                    f"--{name}_train: every question there is also a test question. Give other "
                    "questions, or the same file to both, which splits it."
                )
        if not test[name]:
            raise ConfigurationError(f"--{name}_test: no question is left to test.")
        for row in (*trained.values(), *tested.values()):
            passages |= dict.fromkeys(
                (page.title, _cut(page.passage.text, words)) for page in row.pages
            )
    for path in options.passages:
        passages |= dict.fromkeys((p.title, _cut(p.text, words)) for p in load_passages(path))
    return train, test, [{"title": title, "text": text} for title, text in passages]


def _read(
    spec: DatasetSpec[QARow], files: Sequence[str], split: str, option: str
) -> dict[str, QARow]:
    """Return rows by question."""
    rows: dict[str, QARow] = {}
    try:
        for source in [spec.find(path, None) for path in files] or [spec.find(None, split)]:
            for row in spec.read_all(source):
                rows.setdefault(row.task.question, row)
    except DataError as error:
        raise DataError(f"{option}: {error}") from error
    return rows


def _place(question: str) -> float:
    """Return a hash of a question in [0, 1)."""
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:6]) / 2**48


def _drawn(questions: Iterable[str], count: int) -> list[str]:
    return sorted(questions, key=lambda q: hashlib.sha256(f"drawn {q}".encode()).digest())[:count]


def _cut(text: str, words: int) -> str:
    return " ".join(text.split()[:words]) if words else text


def _record(row: QARow, words: int) -> dict[str, Any]:
    """Return a row in the format of its data set, with its gold passages only."""
    task = row.task
    gold = [(title, _cut(text, words)) for title, text in task.data["gold"]]
    record: dict[str, Any] = {
        "id": task.id,
        "question": task.question,
        "answer": task.answers[0],
        "type": task.data["type"],
    }
    if "is_answerable" in task.data:  # MuSiQue
        paragraphs = [
            {"title": title, "paragraph_text": text, "is_supporting": True} for title, text in gold
        ]
        return record | {"answer_aliases": task.answers[1:], "paragraphs": paragraphs}
    record["context"] = [[title, [text]] for title, text in gold]
    record["supporting_facts"] = [[title, 0] for title, _ in gold]
    if "evidences" in task.data:
        record["evidences"] = task.data["evidences"]
    return record


def _alternating(train: Mapping[str, Rows]) -> Rows:
    return [row for rows in itertools.zip_longest(*train.values()) for row in rows if row]


def _write_rows(path: Path, rows: Rows) -> None:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
