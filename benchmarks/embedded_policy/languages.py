"""Synthetic languages, so that the policy learns sentence structure instead of phrases.

Each expresses the relations of `AgentR1/SyntheticMultiHop-v0` by randomly drawn words, and draws
the names of its entities. What they share can be learned: which words express a relation, and that
an answer is found by one search after the other.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from agent_envs.envs.synthetic.world import VARIANTS, Relation, World, fill_world, names

NOUNS: Final = """
    director writer star birthplace employer award headquarters country composer editor producer
    school instrument residence location territory
""".split()
VERBS: Final = """
    directed wrote starred made scripted appeared born works won based lies comes employed received
    offices belongs
""".split()
_BARE: Final = {"works": "work", "belongs": "belong"}
"""Infinitives of verbs, after an auxiliary."""
_HEADS: Final = "person city company prize country one town firm honour state".split()
_PREPOSITIONS: Final = ("in", "for", "by", "from", "to", "")
KINDS: Final = tuple((r.subject, r.object) for r in VARIANTS["default"].values())
"""Kinds of subject and object of the relations of a language."""
NUM_NAMES: Final[Mapping[str, int]] = {
    "film": 20, "person": 30, "company": 10, "award": 8, "city": 14, "country": 8,
}  # fmt: skip
STYLES: Final = ("nominal", "possessive", "clauses", "mixed")
STYLE_CHANCES: Final = (0.15, 0.15, 0.5, 0.2)


def draw_world(rng: np.random.Generator, *, outdated: bool) -> World:
    """Draw a language and a small world described in it."""
    return fill_world(rng, draw_relations(rng), _draw_names(rng), outdated=outdated)


def draw_relations(rng: np.random.Generator) -> dict[str, Relation]:
    """Draw the phrases of each relation, keyed by the word that expresses it."""
    nouns, verbs = (iter(rng.permutation(words).tolist()) for words in (NOUNS, VERBS))
    kinds = sorted({kind for _, kind in KINDS})
    heads = dict(zip(kinds, rng.permutation(_HEADS).tolist(), strict=False))
    style = str(rng.choice(STYLES, p=STYLE_CHANCES))
    relations: dict[str, Relation] = {}
    for subject, kind in KINDS:
        how = str(rng.choice(STYLES[:3])) if style == "mixed" else style
        word = next(verbs if how == "clauses" else nouns)
        fact, mention, question = map(_clean, _phrases(rng, how, word, heads[kind]))
        relations[word] = Relation(subject, kind, fact, mention, question, word)
    return relations


def _phrases(rng: np.random.Generator, how: str, word: str, head: str) -> Sequence[str]:
    """Return the phrases of a fact, a mention and a question."""
    if how == "clauses":
        says = _object_first if rng.random() < 0.45 else _subject_first
        return says(rng, word, head)
    mention = f"the {word} of {{s}}" if how == "nominal" else f"{{s}} 's {word}"
    return f"{mention} is {{o}} .", mention, f"{rng.choice(['who', 'what'])} is {mention} ?"


def _object_first(rng: np.random.Generator, verb: str, head: str) -> Sequence[str]:
    says = f"{verb} {rng.choice(_PREPOSITIONS) if rng.random() < 0.5 else ''} {{s}}"
    asked = "who" if rng.random() < 0.4 else f"which {head}"
    return f"{{o}} {says} .", f"the {head} who {says}", f"{asked} {says} ?"


def _subject_first(rng: np.random.Generator, verb: str, head: str) -> Sequence[str]:
    after = str(rng.choice(_PREPOSITIONS))
    before = str(rng.choice(["", "", "is", "was", "has"]))
    the = "the" if rng.random() < 0.2 else ""
    mentioned = after if rng.random() < 0.6 else ""
    mention = f"the {head} {rng.choice(['that', 'where'])} {{s}} {before} {verb} {mentioned}"
    first, last = (after, "") if rng.random() < 0.5 else ("", after)
    if rng.random() < 0.25:
        question = f"{first} which {head} {before} {verb} {{s}} {last} ?"
    else:
        auxiliary = before or rng.choice(["does", "has", "does"])
        bare = verb if before else _BARE.get(verb, verb)
        question = f"{first} which {head} {auxiliary} {{s}} {bare} {last} ?"
    return f"{{s}} {before} {verb} {after} {the} {{o}} .", mention, question


def _clean(text: str) -> str:
    return " ".join(text.split())


def _draw_names(rng: np.random.Generator) -> dict[str, list[str]]:
    """Draw names of one or two words for each kind of entity; kinds share no word."""
    left = iter(rng.permutation(names()).tolist())
    things = {}
    for kind, count in NUM_NAMES.items():
        if rng.random() < (0.9 if kind in ("film", "person") else 0.1):
            first, second = ([next(left) for _ in range(6)] for _ in range(2))
            pairs = rng.choice(36, size=count, replace=False).tolist()
            things[kind] = [f"{first[n // 6]} {second[n % 6]}" for n in pairs]
        else:
            things[kind] = [next(left) for _ in range(count)]
    return things
