"""Extract an answer from passages without a model.

The question's words give the expected kind of answer (yes or no, one of two, a date, a number, a
name); the best candidate is in the sentence that shares most words with the question.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from agent_envs.retrieval import STOP_WORDS

UNKNOWN: Final = "unknown"
# "will" may be a name here; results that were published hold the others.
_STOP_WORDS: Final = (STOP_WORDS - {"but", "s", "will"}) | {"both", "into", "same", "than"}
_WORD: Final = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_SENTENCE: Final = re.compile(r"(?<=[.!?])\s+|\n+")
_HIT: Final = re.compile(r"^\[\d+\] (.*)$", re.MULTILINE)
_CHOICE: Final = re.compile(r"[,:]\s*(?:the\s+)?([^,?]+?),?\s+or\s+(?:the\s+)?([^,?]+?)\s*\?*$")
_YES_NO: Final = re.compile(
    r"(?:are|is|was|were|do|does|did|has|have|had|can|could|will|would)\b", re.IGNORECASE
)
_MONTH: Final = (
    "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
)
_DATE: Final = re.compile(rf"\d{{1,2}} {_MONTH} \d{{4}}|{_MONTH} \d{{1,2}}, \d{{4}}")
_YEAR: Final = re.compile(r"\b1\d{3}\b|\b20\d{2}\b")
_NUMBER: Final = re.compile(r"\b\d[\d,]*(?:\.\d+)?\b")
_NAME: Final = re.compile(
    r"[A-ZÀ-ÖØ-Þ][\w'\u2019.-]*(?:\s+(?:(?:of|the|de|van|von|and|la|le)\s+)*[A-ZÀ-ÖØ-Þ][\w'\u2019-]*)*"
)


def extract_answer(question: str, passages: str) -> str:
    """Return the most likely answer from search results, or `UNKNOWN`."""
    if choice := _CHOICE.search(question):
        return _earlier(passages, *choice.groups())
    if _YES_NO.match(question.strip()):
        return "yes"
    for find in (*_finders(question.lower()), _names, _rare_words):
        candidates = list(find(question, passages))
        if candidates:
            return max(candidates, key=lambda candidate: candidate[0])[1]
    return UNKNOWN


Candidates = Iterator[tuple[float, str]]
Finder = Callable[[str, str], Candidates]


def _finders(question: str) -> Sequence[Finder]:
    """Return finders for the expected kind of answer, the most reliable first."""
    if re.search(r"\b(?:what|which) year\b", question):
        return (_matches(_YEAR),)
    if re.search(r"\bwhen\b|\b(?:what|which) date\b|\bdate of (?:birth|death)\b", question):
        return (_matches(_DATE), _matches(_YEAR))
    if re.search(r"\bhow (?:many|much|old|far|long|tall|large)\b|\bwhat number\b", question):
        return (_matches(_NUMBER),)
    return ()


def _matches(pattern: re.Pattern[str]) -> Finder:
    def find(question: str, passages: str) -> Candidates:
        for score, sentence in _scored_sentences(question, passages):
            for match in pattern.finditer(sentence):
                if match.group() not in question:
                    yield score, match.group()

    return find


def _names(question: str, passages: str) -> Candidates:
    """Yield capitalised names that are not in the question; full names first for a "who"."""
    asked = question.lower()
    wants_person = re.search(r"\bwho(?:m|se)?\b", asked) is not None
    for score, sentence in _scored_sentences(question, passages):
        for match in _NAME.finditer(sentence):
            name = match.group().strip(" .,'-\u2019")
            if not name or name.lower() in asked or name.lower() in _STOP_WORDS:
                continue
            yield score + 0.5 * (wants_person and " " in name), name


def _rare_words(question: str, passages: str) -> Candidates:
    """Yield words of each sentence that are not in the question: for lower-case text."""
    for score, sentence in _scored_sentences(question, passages):
        known = set(_words(question)) | _STOP_WORDS
        words = [word for word in _words(sentence) if word not in known]
        if words:
            yield score, " ".join(words[-2:])


def _scored_sentences(question: str, passages: str) -> Iterator[tuple[float, str]]:
    """Yield each sentence with its overlap with the question; earlier ones win ties."""
    asked = set(_words(question)) - _STOP_WORDS
    position = 0
    for title, text in _hits(passages):
        in_title = len(asked & set(_words(title)))
        for sentence in _SENTENCE.split(text):
            position += 1
            yield len(asked & set(_words(sentence))) + in_title - 0.01 * position, sentence


def _hits(passages: str) -> Iterable[tuple[str, str]]:
    parts = _HIT.split(passages)
    if len(parts) == 1:
        return [("", passages)]
    return zip(parts[1::2], parts[2::2], strict=True)


def _earlier(passages: str, first: str, second: str) -> str:
    """Return which of two things the passages mention first; the first where they mention none."""
    text = passages.lower()
    places = {choice: text.find(choice.lower()) for choice in (first, second)}
    found = [choice for choice in (first, second) if places[choice] >= 0]
    return min(found, key=lambda choice: places[choice], default=first)


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
