"""Refuse misleading names: hidden characters, mixed scripts, and names that look like others.

Unicode has many spellings of one appearance. `why_unclear` refuses what no honest name needs;
`skeleton` maps names that look alike to one text (a small part of Unicode TS #39).
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any, Final

FIELDS: Final = ("name", "organisation", "model", "made_by", "licence", "url")
"""Agent fields that pages show."""
INVISIBLE: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Unicode categories without a visible glyph: controls, direction marks, surrogates, ..."""
_BLANK: Final = ("FILLER", "BLANK", "VARIATION SELECTOR", "GRAPHEME JOINER")
"""Parts of the names of invisible characters of other categories."""
_COMPATIBLE_SCRIPTS: Final = (
    frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO")),
    frozenset(("CJK", "HANGUL")),
)
"""Scripts that share words in Japanese and in Korean."""
_SCRIPTS: Final = frozenset(
    "ARABIC ARMENIAN BENGALI BOPOMOFO CJK CYRILLIC DEVANAGARI ETHIOPIC GEORGIAN GREEK GUJARATI "
    "GURMUKHI HANGUL HEBREW HIRAGANA IDEOGRAPHIC KANNADA KATAKANA KATAKANA-HIRAGANA KHMER LAO "
    "MALAYALAM MYANMAR ORIYA SINHALA TAMIL TELUGU THAANA THAI TIBETAN".split()
)
"""Recommended scripts of Unicode UAX #31 besides Latin: rarer ones have look-alikes of all Latin
letters."""
_LATIN: Final = re.compile(r"^LATIN (?:SMALL |CAPITAL |LETTER )+(?:[A-Z]+ )*?([A-Z])(?: WITH .*)?$")
_CAPITALS: Final = str.maketrans("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "abezhikmnoptyx")  # noqa: RUF001 - confusables
_CONFUSABLES: Final = str.maketrans(
    "авекмнорстухѕіјһԁԛԝьɑικνορυχϲօʟ01|",  # noqa: RUF001 - confusables
    "abekmhopctyxsijhdqwbalkvopuxcololl",
)


def why_unclear(text: str) -> str | None:
    """Return why `text` can be misread, or None."""
    for character in text:
        category, name = unicodedata.category(character), unicodedata.name(character, "")
        if category in INVISIBLE or any(word in name for word in _BLANK):
            return f"contains the invisible character U+{ord(character):04X} {name}".rstrip()
    if (plain := unicodedata.normalize("NFKC", text)) != text:
        return f"contains compatibility characters; write {plain!a}"
    if " ".join(text.split()) != text:
        return "begins or ends with a space, or has several in a row"
    words = {word: _scripts(word) for word in re.findall(r"[^\W_]+", text)}
    for word, scripts in words.items():
        if len(scripts) > 1 and not any(scripts <= group for group in _COMPATIBLE_SCRIPTS):
            return f"mixes {' and '.join(sorted(scripts))} in one word, {word!a}"
    if rare := "".join(map(_rare_letters, words)):
        return f"contains a letter of a rare script or of phonetics, {rare[0]!a}"
    for word, scripts in words.items() if {"LATIN"} in words.values() else ():
        if scripts - {"LATIN"} and skeleton(word).isascii():
            return f"{word!a} imitates Latin letters"
    return None


def skeleton(text: str) -> str:
    """Return one text for all names that look alike; not for display."""
    plain = text.translate(_CAPITALS).casefold()
    letters = "".join(map(_base, unicodedata.normalize("NFKD", plain)))
    words = re.split(r"[\W_]+", letters.translate(_CONFUSABLES).replace("i", "l"))
    return "-".join(words).strip("-").replace("rn", "m").replace("vv", "w")


def misleading_names(agents: Iterable[Any]) -> Iterator[str]:
    """Yield fields of agents that can be misread, or that look like an earlier agent's."""
    seen: dict[tuple[str, str], Any] = {}
    for agent in agents:
        where = f"agent {agent.slug!r}, field"
        for word in skeleton(agent.name).split("-"):
            if (kind := _RESERVED.get(word, agent.kind)) != agent.kind:
                yield f"{where} 'name': names the kind {kind!r}, and is of another, {agent.kind!r}"
        for name in FIELDS:
            text = getattr(agent, name) or ""
            if why := why_unclear(text):
                yield f"{where} {name!r}: {why}"
            if name not in ("name", "organisation"):
                continue
            other = seen.setdefault((name, skeleton(text)), agent)
            known = getattr(other, name) or ""
            words, others = (re.findall(r"[^\W_]+", one.casefold()) for one in (text, known))
            # Another case and other punctuation are no other name.
            if words != others or (name == "name" and other.kind != agent.kind):
                yield (
                    f"{where} {name!r}: {text!a} looks like {known!a}, which is on this board; "
                    "choose another name"
                )
        if agent.url is not None and not re.match(r"https?://\S+$", agent.url):
            yield f"{where} 'url': {agent.url[:80]!a} must begin with https://"


def _scripts(word: str) -> set[str]:
    return {unicodedata.name(c, "NONE").split()[0] for c in word if c.isalpha()}


def _rare_letters(word: str) -> str:
    """Return the letters that are not like those of Latin, and of none of `_SCRIPTS`."""
    letters = (c for c in skeleton(word) if not c.isascii() and c not in "æœþðŋə")
    return "".join(c for c in letters if not _scripts(c) <= _SCRIPTS)


def _base(character: str) -> str:
    """Return a letter without diacritics: nothing for a combining mark."""
    if unicodedata.combining(character):
        return ""
    found = _LATIN.match(unicodedata.name(character, ""))
    return found[1].lower() if found and not character.isascii() else character


_RESERVED: Final = {skeleton(kind): kind for kind in ("oracle", "random", "heuristic")} | {
    "rules": "heuristic"
}
"""Kind of agent that each reserved word of a name belongs to."""
