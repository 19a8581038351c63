"""Made-up languages, so that a tiny policy learns to read and to copy instead of what is said.

Each says the relations of `AgentR1/SyntheticMultiHop-v0` in words of its own, drawn anew, and calls
its things by names drawn anew. What all have in common is all that can be learned from many: that
an answer is found by putting what was found into the question, until nothing is left to find.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from agent_envs.envs.synthetic.world import VARIANTS, Relation, World, fill_world, names, vocabulary

KINDS: Final = tuple((r.subject, r.object) for r in VARIANTS["default"].values())
"""What the relations of a language lead from and to."""
NUM_NAMES: Final[Mapping[str, int]] = {
    "film": 12, "person": 16, "company": 8, "award": 8, "city": 12, "country": 8,
}  # fmt: skip
GRAMMAR: Final = frozenset(("the", "of", "is", "was", "?", ".", "'s", "who", "what", "which"))
"""Words that every language keeps."""
STYLES: Final = ("nominal", "possessive", "clauses", "mixed")
STYLE_CHANCES: Final = (0.15, 0.1, 0.6, 0.15)

Draw = Callable[[], str]


def invent_world(rng: np.random.Generator, *, outdated: bool) -> World:
    """Draw a language and a small world that is told in it."""
    return fill_world(rng, invent_relations(rng), _invent_names(rng), outdated=outdated)


def invent_relations(rng: np.random.Generator) -> dict[str, Relation]:
    """Draw how each relation is said, keyed by its noun."""
    known = set(names())
    words = [w for w in vocabulary() if w not in known and w not in GRAMMAR]
    left = iter(rng.permutation(words).tolist() * 2)  # few words mean two things
    heads = {kind: next(left) for _, kind in KINDS}
    style = str(rng.choice(STYLES, p=STYLE_CHANCES))
    relations = {}
    for subject, kind in KINDS:
        noun = next(left)
        how = str(rng.choice(STYLES[:3])) if style == "mixed" else style
        said = _SAY[how](rng, noun, heads[kind], left.__next__)
        relations[noun] = Relation(subject, kind, *said)
    return relations


def _nominal(rng: np.random.Generator, noun: str, head: str, draw: Draw) -> Sequence[str]:
    asked = rng.choice(["who is", "what is", "which is"])
    mention = f"the {noun} of {{s}}"
    return f"{mention} is {{o}} .", mention, f"{asked} {mention} ?", ""


def _possessive(rng: np.random.Generator, noun: str, head: str, draw: Draw) -> Sequence[str]:
    asked = rng.choice(["who is", "what is", "which is"])
    mention = f"{{s}} 's {noun}"
    return f"{mention} is {{o}} .", mention, f"{asked} {mention} ?", ""


def _clauses(rng: np.random.Generator, noun: str, head: str, draw: Draw) -> Sequence[str]:
    """Say the relation with a verb: by its subject, or by its object."""
    verb = draw()
    after = draw() if rng.random() < 0.6 else ""
    if rng.random() < 0.5:
        return _object_first(rng, head, f"{verb} {after}".strip(), draw)
    return _subject_first(rng, head, verb, after, draw)


def _object_first(rng: np.random.Generator, head: str, verb: str, draw: Draw) -> Sequence[str]:
    who = "who" if rng.random() < 0.7 else draw()
    asked = "who" if rng.random() < 0.3 else f"which {head}"
    return f"{{o}} {verb} {{s}} .", f"the {head} {who} {verb} {{s}}", f"{asked} {verb} {{s}} ?", ""


def _subject_first(
    rng: np.random.Generator, head: str, verb: str, after: str, draw: Draw
) -> Sequence[str]:
    before = str(rng.choice(["", "", "is", "was", draw()]))
    the = "the" if rng.random() < 0.2 else ""
    fact = f"{{s}} {before} {verb} {after} {the} {{o}} ."
    asked_verb = verb if before or rng.random() < 0.6 else draw()  # works for, does work for
    that = rng.choice(["that", "where", draw()])
    mentioned = after if rng.random() < 0.6 else ""
    mention = f"the {head} {that} {{s}} {before} {verb} {mentioned}"
    first, last = (after, "") if rng.random() < 0.5 else ("", after)
    if rng.random() < 0.25:
        question = f"{first} which {head} {before} {verb} {{s}} {last} ?"
    else:
        auxiliary = before or draw()
        question = f"{first} which {head} {auxiliary} {{s}} {asked_verb} {last} ?"
    return *(" ".join(text.split()) for text in (fact, mention, question)), ""


_SAY: Final = {"nominal": _nominal, "possessive": _possessive, "clauses": _clauses}


def _invent_names(rng: np.random.Generator) -> dict[str, list[str]]:
    """Draw names of one or two words for each kind of thing; no word is of two kinds."""
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
