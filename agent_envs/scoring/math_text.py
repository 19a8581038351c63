r"""Notation of mathematical answers: Unicode as LaTeX, units, and copies of the question."""

# ruff: noqa: RUF001 - Unicode is what is read

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Final

_SCRIPTS: Final = {
    "^": str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n"),
    "_": str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()"),
}
_SYMBOLS: Final = str.maketrans({
    "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "×": r"\times ", "⋅": r"\cdot ",
    "·": r"\cdot ", "÷": "/", "\u2044": "/", "\u2215": "/", "\u2212": "-", "\u2013": "-",
    "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ",
})  # fmt: skip
_VULGAR: Final = re.compile(r"(?<![\d.,])(\d*)\s?([¼-¾⅐-⅞↉])")
_MIXED: Final = re.compile(r"(?<![\d.,/])(\d+) +(\d+) ?/ ?(\d+)(?![\d.,/])")
_EXPONENT: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?!\w)")
_ROOT: Final = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))")
_DEGREES: Final = {"√": "", "∛": "[3]", "∜": "[4]"}
_THIN_THOUSANDS: Final = re.compile("(?<=\\d)[\u00a0\u2009\u202f](?=\\d{3}(?!\\d))")

_UNITS: Final = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre",
        "km kilometer kilometre", "in inch inche", "ft foot feet", "yd yard", "mi mile",
        "s sec second", "min minute", "h hr hour", "day", "week", "month", "yr year",
        "mg milligram", "g gram", "kg kilogram", "oz ounce", "lb pound", "ml milliliter millilitre",
        "l liter litre", "gal gallon", "cent", "dollar usd", "euro", "°C", "°F", "degree",
        "rad radian",
    )
    for alias in names.split()
}  # fmt: skip
_UNIT: Final = re.compile(
    r"(?P<value>.*[\d)}])(?:\s|\\[,;!: ]|~)*(?:\\(?:text|mbox|mathrm)\s*\{\s*)?"
    r"(?P<power>square|sq\.?|cubic|cu\.?)?\s*(?P<name>[A-Za-z]+)\.?\s*\}?"
    r"(?:\s*\^\s*\{?(?P<exponent>[23])\}?)?"
)
_POWERS: Final = {None: "1", "sq": "2", "cu": "3"}
_CURRENCY: Final = re.compile(r"[€£¥₹]")

_FUNCTIONS: Final = "sqrt|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|binom|pi"
_TOKEN: Final = re.compile(
    rf"\d+(?:,\d{{3}})*(?:\.\d+)?|\.\d+|\\?(?:{_FUNCTIONS})|\\[A-Za-z]+|[A-Za-z]|[-+^!]"
)
_LAYOUT: Final = frozenset(
    "frac dfrac tfrac cdot times div left right displaystyle text mbox mathrm over quad".split()
)
_TEXT: Final = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}")
_SHORT_FRACTION: Final = re.compile(r"frac\s*(\d)\s*(\d)")
_HALF_POWER: Final = re.compile(r"\^\s*[{(]\s*(?:1\s*/\s*2|\\[dt]?frac\{1\}\{2\}|0?\.50*)\s*[)}]")
_FORMULA: Final = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_LITERAL: Final = re.compile(
    r"\s*\\?\$?\s*[-+]?\s*\\?\$?(?:\d[\d,]*(?:\.\d*)?|\.\d+)\s*(?:\\?%|\^\{?\\circ\}?)?\s*"
    r"(?:(?:\\(?:text|mbox|mathrm)\s*\{[^{}]*\}|[A-Za-z.\s]+)(?:\^\{?[23]\}?)?)?\s*"
)
_TEN: Final = re.compile(r"\s*\\(?:times|cdot)\s*10(?=\s*\^)")
_OPERATION: Final = re.compile(
    r"(?<=[\d)}\]!])\s*(?:[-+*]|\\(?:cdot|times|div)(?![a-z]))\s*[\d({\\.]"
)


def latex(text: str) -> str:
    """Return an answer as LaTeX: ``½``, ``x²``, ``1 3/4``, ``1e6``, any script's digits, spaces."""
    text = "".join(str(unicodedata.decimal(c, c)) for c in text if unicodedata.category(c) != "Cf")
    text = _EXPONENT.sub(r"\1 \\times 10^{\2}", _MIXED.sub(r"\1\\frac{\2}{\3}", text))
    text = _ROOT.sub(_write_root, _VULGAR.sub(_write_fraction, _THIN_THOUSANDS.sub("", text)))
    for mark, table in _SCRIPTS.items():
        chars = "".join(map(chr, table))
        text = re.sub(
            f"[{chars}]+", lambda m: f"{mark}{{{m[0].translate(table)}}}", text  # noqa: B023
        )  # fmt: skip
    return unicodedata.normalize("NFKC", text.translate(_SYMBOLS))


def _write_fraction(match: re.Match[str]) -> str:
    whole = int(match[1] or 0)
    value = whole + Fraction(unicodedata.numeric(match[2])).limit_denominator(10)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _write_root(match: re.Match[str]) -> str:
    return rf"\sqrt{_DEGREES[match[1]]}{{{next(filter(None, match.groups()[1:]), '')}}}"


def units_differ(answer: str, gold: str) -> bool:
    """Return whether both state a unit, or a currency, and not the same one."""
    units = _unit(answer), _unit(gold)
    if None not in units and units[0] != units[1]:
        return True
    return r"\$" in gold and bool(_CURRENCY.search(answer))


def without_unit(text: str) -> str:
    """Return an answer without its unit, if it is a known one, and without a percent sign."""
    text = re.sub(r"(?<=[\d}])\s*\\?%", "", text)
    match = _UNIT.fullmatch(text.strip())
    return match["value"] if match and _unit(text) else text


def _unit(text: str) -> tuple[str, str] | None:
    """Return unit and power of a value; None if it states none, or an unknown one."""
    match = _UNIT.fullmatch(re.sub(r"\^\s*\{?\s*\\circ\s*\}?", " degree", text).strip())
    if match is None:
        return None
    name = match["name"]
    is_symbol = len(name) == 1 and re.search(r"[\d)}]" + name, text)  # 5m may be a product
    found = _UNITS.get(name) or _UNITS.get(name.lower().removesuffix("s"))
    power = match["exponent"] or _POWERS[match["power"] and match["power"][:2]]
    return None if found is None or is_symbol else (found, power)


def is_number(text: str) -> bool:
    """Return whether an answer is a number, perhaps with a unit, and nothing to be calculated."""
    return _LITERAL.fullmatch(text.strip(" ()")) is not None


def has_operation(text: str) -> bool:
    """Return whether a sum, difference or product is left to be calculated."""
    return _OPERATION.search(_TEN.sub("", text)) is not None


def without_asked_noun(text: str, question: str) -> str:
    """Return a number without the noun that a question asks for: ``How many clips``."""
    number, _, noun = text.strip().partition(" ")
    asked = re.search(rf"how many {re.escape(noun)}\b", question, re.IGNORECASE)
    return number if asked and is_number(number) else text


def is_copied(answer: str, gold: str, question: str) -> bool:
    """Return whether an answer is an expression of the question, other than the gold answer.

    Layout, spaces, brackets, the order of terms, ``+ 0`` and ``* 1`` make no difference. A single
    letter or word is no expression.
    """
    said, core = _tokens(answer), _core(answer)
    if core in (_core(gold), _core(gold.rpartition("=")[2])):
        return False
    if not any(token[0].isdigit() or len(said) > 1 for token in said):
        return False
    question = latex(question)
    is_formula = len(core) > 1 and core in map(_core, formulas(question))
    return _contains(_tokens(question), said) or is_formula


def contained_formulas(answer: str, question: str) -> list[str]:
    """Return the formulas of a question that a longer answer contains."""
    said = _tokens(answer)
    return [
        formula for formula in dict.fromkeys(formulas(latex(question)))
        if len(tokens := _tokens(formula)) > 1 and _contains(said, tokens) and said != tokens
    ]  # fmt: skip


def formulas(question: str) -> Iterator[str]:
    """Yield the formulas of a question, and the sides of its equations."""
    for groups in _FORMULA.findall(question):
        formula = next(filter(None, groups), "")
        yield formula.strip(" .,?")
        if "=" in formula:
            yield from (side.strip(" .,?") for side in formula.split("="))


def _tokens(text: str) -> list[str]:
    """Return numbers, letters, functions and signs, without layout."""
    text = _SHORT_FRACTION.sub(r"frac{\1}{\2}", _TEXT.sub(" ", text))
    text = _HALF_POWER.sub(r"\\sqrt ", text.replace("choose", "binom"))
    tokens = (token.lstrip("\\") for token in _TOKEN.findall(text))
    return [
        f"{Decimal(token.replace(',', '')).normalize():f}" if token[-1].isdigit() else token
        for token in tokens
        if token not in _LAYOUT
    ]


def _core(formula: str) -> list[str]:
    """Return the tokens in alphabetical order, without those that change no value."""
    return sorted(token for token in _tokens(formula) if token not in ("+", "0", "1"))


def _contains(tokens: list[str], part: list[str]) -> bool:
    size = len(part)
    return any(tokens[i : i + size] == part for i in range(len(tokens) - size + 1))
