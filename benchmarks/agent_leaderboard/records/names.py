"""Names that people read on a board: what they see is what is written, and nobody else's name.

Unicode has many ways to write one look: letters of other scripts, full-width ones, characters that
show nothing or turn the direction of text. `why_unclear` refuses what no honest name needs;
`look` gives names that are read as the same one text (a small part of Unicode's TS #39).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, Final

FIELDS: Final = ("name", "organisation", "model", "made_by", "licence", "url")
"""Of an agent: what the pages show as it is written."""
UNSEEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories of characters that show nothing themselves: controls, marks that turn the
direction of text, lone surrogates, private and unassigned ones, separators of lines."""
_BLANK: Final = ("FILLER", "BLANK", "VARIATION SELECTOR", "GRAPHEME JOINER")
"""In the names of characters of other categories that show nothing either."""
_TOGETHER: Final = (
    frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO")),
    frozenset(("CJK", "HANGUL")),
)
"""Scripts that stand in one word: of Japanese, and of Korean."""
_LATIN: Final = re.compile(r"^LATIN (?:SMALL |CAPITAL |LETTER )+(?:[A-Z]+ )*?([A-Z])(?: WITH .*)?$")
"""The letter that the name of a letter without a decomposition ends in: ``DOTLESS I``."""
_CAPITALS: Final = str.maketrans("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "abezhikmnoptyx")  # noqa: RUF001 - likewise
"""Capitals of Greek whose small letters look like nothing in Latin, or like another letter."""
_ALIKE: Final = str.maketrans(
    "авекмнорстухѕіјһԁԛԝьɑικνορυχϲօʟ01|",  # noqa: RUF001 - they are meant
    "abekmhopctyxsijhdqwbalkvopuxcololl",
)
"""Letters of Cyrillic, Greek and other alphabets, and digits, that look like one of Latin."""


def why_unclear(text: str) -> str | None:
    """Return why `text` can be read as something else than it is; None if it cannot."""
    for character in text:
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        if category in UNSEEN or any(word in name for word in _BLANK):
            return f"it holds a character that nobody sees, U+{ord(character):04X} {name}".rstrip()
    if (plain := unicodedata.normalize("NFKC", text)) != text:
        return f"it is written with compatibility characters; write {plain!a}"
    if " ".join(text.split()) != text:
        return "it begins or ends with a space, or has several in a row"
    words = {word: _scripts(word) for word in re.findall(r"[^\W_]+", text)}
    for word, scripts in words.items():
        if len(scripts) > 1 and not any(scripts <= group for group in _TOGETHER):
            return f"letters of {' and '.join(sorted(scripts))} stand in one word, {word!a}"
    for word, scripts in words.items() if {"LATIN"} in words.values() else ():
        if scripts - {"LATIN"} and look(word).isascii():
            return f"{word!a} looks like a word of Latin letters, and is none"
    return None


def look(text: str) -> str:
    """Return the same text for names that look alike, and for no others; for no eyes."""
    plain = text.translate(_CAPITALS).casefold()
    letters = "".join(map(_base, unicodedata.normalize("NFKD", plain)))
    words = re.split(r"[\W_]+", letters.translate(_ALIKE).replace("i", "l"))
    return "-".join(words).strip("-").replace("rn", "m").replace("vv", "w")


def unclear_names(agent: Any) -> Iterator[str]:
    """Yield what of an agent can be read as something else, field by field."""
    for name in FIELDS:
        if why := why_unclear(getattr(agent, name) or ""):
            yield f"field {name!r}: {why}"
    if agent.url is not None and not re.match(r"https?://\S+$", agent.url):
        yield f"field 'url': {agent.url[:80]!a} is no address that begins with https://"


def look_alikes(agents: Iterable[Any]) -> Iterator[str]:
    """Yield agents whose names, or whose organisations' names, are read as those of others."""
    seen: dict[tuple[str, str], str] = {}
    for agent in agents:
        for name in ("name", "organisation"):
            text = getattr(agent, name) or ""
            known = seen.setdefault((name, look(text)), text)
            if not is_same_name(text, known):
                yield (
                    f"agent {agent.slug!r}, field {name!r}: {text!a} looks like "
                    f"{known!a}, which is on this board; write another name"
                )


def is_same_name(one: str, other: str) -> bool:
    """Return whether names differ in case and punctuation at most."""
    first, second = (re.findall(r"[^\W_]+", text.casefold()) for text in (one, other))
    return first == second


def _scripts(word: str) -> set[str]:
    """Return the scripts of a word's letters: each is the first word of a letter's name."""
    return {unicodedata.name(c, "NONE").split()[0] for c in word if c.isalpha()}


def _base(character: str) -> str:
    """Return a character without its marks: nothing for a mark, ``o`` for a stroked one."""
    if unicodedata.combining(character):
        return ""
    found = _LATIN.match(unicodedata.name(character, ""))
    return found[1].lower() if found and not character.isascii() else character
