"""A procedural world of films, people, companies and cities, with multi-hop questions.

A world is a list of one-sentence facts, one passage each. A question follows a chain of facts: the
director of a film, the city where that person was born, its country.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from agent_envs.core.lookup import lookup
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval import Passage

NUM_FILMS: Final = 40
NUM_PEOPLE: Final = 60

_FIRST_NAMES: Final = """
    ada bruno clara dario elsa felix greta hugo ines jonas karin leo mira nico olga pavel
    rosa stefan tilda victor
""".split()
_LAST_NAMES: Final = """
    arden brandt castell dorn ekberg falk garnier holm ivanov jansen keller lund marek novak
    orlov petrov quist rossi sandoval thorne
""".split()
_FILM_ADJECTIVES: Final = """
    amber broken crimson distant empty frozen golden hidden iron jade last midnight northern
    paper quiet silver
""".split()
_FILM_NOUNS: Final = """
    anchor bridge canyon desert engine forest garden harbor island lantern mirror orchard
    river station tower window
""".split()
_THINGS: Final[Mapping[str, Sequence[str]]] = {
    "city": """
        altona bergen cadiz delft evora fulda ghent havre izmir jena kazan lugano malmo nantes
        oulu porto riga siena turku vigo
    """.split(),
    "country": "arland borania cestia dalmor elvany fordia gallen hestria iberon jutia".split(),
    "company": "acme bolt cobalt delta ember flux granite helix indigo juno krypton lumen".split(),
    "award": "laurel medallion orchid pearl quill ribbon sceptre trident".split(),
    "school": "academy birch cedar dune elm fir hawthorn juniper".split(),
    "instrument": "banjo cello drum flute harp oboe piano viola".split(),
}
"""Things that exist in every world; films and people are drawn."""


class Relation(NamedTuple):
    """Types and texts of one kind of fact; {s} and {o} stand for subject and object."""

    subject: str
    """The type of the subject."""
    object: str
    """The type of the object, which is the answer."""
    fact: str
    """The sentence of the fact, with {s} and {o}."""
    noun: str
    """The mention of the object in a longer question, with {s}."""
    question: str
    """The question for the object as the last hop, with {s}."""
    query: str
    """A search that finds the fact, with {s}."""


def _plain(*relations: str) -> dict[str, Relation]:
    """Make relations with the same phrasing, each given as subject, name and object."""
    made = {}
    for subject, name, kind in map(str.split, relations):
        noun = f"the {name} of {{s}}"
        question = f"{'who' if kind == 'person' else 'what'} is {noun} ?"
        made[name] = Relation(
            subject, kind, f"{noun} is {{o}} .", noun, question, f"{name} of {{s}}"
        )
    return made


_CORE: Final[Mapping[str, Relation]] = _plain(
    "film director person",
    "film writer person",
    "film star person",
    "person birthplace city",
    "person employer company",
    "person award award",
    "company headquarters city",
    "city country country",
)
_POSSESSIVE: Final[Mapping[str, Relation]] = {
    name: Relation(
        subject,
        kind,
        f"{{s}} 's {name} is {{o}} .",
        f"{{s}} 's {name}",
        f"{'who' if kind == 'person' else 'what'} is {{s}} 's {name} ?",
        f"{{s}} 's {name}",
    )
    for name, (subject, kind, *_) in _CORE.items()
}


def _phrased(lines: str) -> dict[str, Relation]:
    """Rephrase the core relations; each line is ``name | fact | noun | question``."""
    made = {}
    for name, fact, noun, question in (line.strip().split(" | ") for line in lines.splitlines()):
        query = fact.replace("{o}", "").strip(" .")
        made[name] = Relation(*_CORE[name][:2], fact, noun, question, query)
    return made


_CLAUSES: Final[Mapping[str, Relation]] = _phrased(
    """director | {o} made {s} . | the one who made {s} | who made {s} ?
    writer | {o} scripted {s} . | the one who scripted {s} | who scripted {s} ?
    star | {o} appeared in {s} . | the one who appeared in {s} | who appeared in {s} ?
    birthplace | {s} comes from {o} . | the town that {s} comes from | from which town comes {s} ?
    employer | {s} is employed by {o} . | the firm that {s} is employed by | which firm is {s} employed by ?
    award | {s} received the {o} . | the honour that {s} received | which honour has {s} received ?
    headquarters | {s} has offices in {o} . | the town where {s} has offices | in which town has {s} offices ?
    country | {s} belongs to {o} . | the state that {s} belongs to | which state does {s} belong to ?"""  # noqa: E501
)
_PARAPHRASE: Final[Mapping[str, Relation]] = _phrased(
    """director | {o} directed {s} . | the person who directed {s} | which person directed {s} ?
    writer | {o} wrote {s} . | the person who wrote {s} | which person wrote {s} ?
    star | {o} starred in {s} . | the person who starred in {s} | which person starred in {s} ?
    birthplace | {s} was born in {o} . | the city where {s} was born | in which city was {s} born ?
    employer | {s} works for {o} . | the company that {s} works for | which company does {s} work for ?
    award | {s} won the {o} . | the prize that {s} won | which prize has {s} won ?
    headquarters | {s} is based in {o} . | the city where {s} is based | in which city is {s} based ?
    country | {s} lies in {o} . | the country where {s} lies | in which country lies {s} ?"""  # noqa: E501
)
_NOVEL: Final[Mapping[str, Relation]] = _plain(
    "film composer person",
    "film editor person",
    "film producer person",
    "person school school",
    "person instrument instrument",
    "person residence city",
    "school location city",
    "city territory country",
)

VARIANTS: Final[Mapping[str, Mapping[str, Relation]]] = {
    "default": _CORE,
    "possessive": _POSSESSIVE,
    "clauses": _CLAUSES,
    "paraphrase": _PARAPHRASE,
    "relations": _NOVEL,
    "injected": _CORE,
}
"""``default``, ``possessive`` and ``clauses`` are the training variants of the default run;
``paraphrase`` rephrases the same relations; ``relations`` has other relations; ``injected`` is the
default with prompt injections in search results."""

STARTS: Final = {
    relation.subject: relation.subject
    for relations in VARIANTS.values()
    for relation in relations.values()
}
"""The kinds of things from which questions can start in any variant."""
MAX_HOPS: Final = 4


@dataclass(frozen=True, slots=True)
class Fact:
    """A relation between two things, each by name."""

    relation: str
    subject: str
    object: str


@dataclass(frozen=True, slots=True)
class World:
    """Facts and their passages."""

    relations: Mapping[str, Relation]
    """The relations of the variant."""
    facts: tuple[Fact, ...]
    """The true facts."""
    passages: tuple[Passage, ...]
    """A passage per fact in the same order, then outdated ones, if any."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the facts that lead to its answer."""

    text: str
    answer: str
    gold: tuple[int, ...]
    """Numbers of the gold passages, in the order of the hops."""
    queries: tuple[str, ...]
    """Searches that find them, in the same order."""


def make_world(
    rng: np.random.Generator, *, variant: str = "default", outdated: bool = False
) -> World:
    """Draw a world; `outdated` adds a passage with an earlier object of each fact."""
    relations = lookup(VARIANTS, variant, kind="variant")
    things = {
        "film": _draw_pairs(rng, _FILM_ADJECTIVES, _FILM_NOUNS, NUM_FILMS),
        "person": _draw_pairs(rng, _FIRST_NAMES, _LAST_NAMES, NUM_PEOPLE),
        **_THINGS,
    }
    return fill_world(rng, relations, things, outdated=outdated)


def fill_world(
    rng: np.random.Generator,
    relations: Mapping[str, Relation],
    things: Mapping[str, Sequence[str]],
    *,
    outdated: bool = False,
) -> World:
    """Draw the facts of a world: one of each relation for each of the `things` of its kind."""
    facts = [
        Fact(name, subject, _draw(rng, things[relation.object]))
        for name, relation in relations.items()
        for subject in things[relation.subject]
    ]
    order = rng.permutation(len(facts)).tolist()
    facts = [facts[i] for i in order]
    passages = [
        Passage(f.subject, relations[f.relation].fact.format(s=f.subject, o=f.object))
        for f in facts
    ]
    if outdated:
        passages += [
            _outdated(fact, things[relations[fact.relation].object], rng) for fact in facts
        ]
    return World(relations, tuple(facts), tuple(passages))


def make_question(
    world: World, rng: np.random.Generator, *, hops: int = 2, start: str = "film"
) -> Question:
    """Draw a question whose answer needs `hops` facts; the first is about a `start`.

    Raises:
        ConfigurationError: If no chain of this kind is so long.
    """
    if not 1 <= hops <= (most := reach(world.relations, start)):
        raise ConfigurationError(f"hops must be 1 to {most} from a {start}, not {hops}.")
    number = {(fact.relation, fact.subject): i for i, fact in enumerate(world.facts)}
    path = _draw_path(world.relations, rng, hops, start)
    starts = [fact.subject for fact in world.facts if fact.relation == path[0]]
    subject = mention = _draw(rng, starts)
    gold, queries = [], []
    for depth, name in enumerate(path, start=1):
        relation = world.relations[name]
        gold.append(number[name, subject])
        queries.append(relation.query.format(s=subject))
        text = relation.question if depth == hops else relation.noun
        mention = text.format(s=mention)
        subject = world.facts[gold[-1]].object
    return Question(mention, subject, tuple(gold), tuple(queries))


def names() -> tuple[str, ...]:
    """Return all words of names, sorted."""
    groups = (_FIRST_NAMES, _LAST_NAMES, _FILM_ADJECTIVES, _FILM_NOUNS, *_THINGS.values())
    return tuple(sorted({word for group in groups for word in group}))


def vocabulary() -> tuple[str, ...]:
    """Return all words of all variants, sorted."""
    words = set(names())
    for relations in VARIANTS.values():
        for relation in relations.values():
            for text in (relation.fact, relation.noun, relation.question, relation.query):
                words.update(text.format(s="", o="").split())
    return tuple(sorted(words))


def _draw(rng: np.random.Generator, names: Sequence[str]) -> str:
    # equal to rng.choice, without an array of the names
    return names[int(rng.integers(len(names)))]


def _draw_pairs(
    rng: np.random.Generator, first: Sequence[str], second: Sequence[str], count: int
) -> list[str]:
    """Draw `count` different combinations of a first and a second word."""
    numbers = rng.choice(len(first) * len(second), size=count, replace=False).tolist()
    return [f"{first[n // len(second)]} {second[n % len(second)]}" for n in numbers]


def reach(relations: Mapping[str, Relation], kind: str) -> int:
    """Return the maximal number of hops from a thing of this kind."""
    following = {r.object for r in relations.values() if r.subject == kind}
    return 1 + max(reach(relations, other) for other in following) if following else 0


def _draw_path(
    relations: Mapping[str, Relation], rng: np.random.Generator, hops: int, start: str
) -> list[str]:
    """Draw a chain of relations; each starts from the type of the previous object."""
    kind, path = start, []
    for remaining in range(hops - 1, -1, -1):
        choices = [
            name
            for name, relation in relations.items()
            if relation.subject == kind and reach(relations, relation.object) >= remaining
        ]
        path.append(_draw(rng, choices))
        kind = relations[path[-1]].object
    return path


def _outdated(fact: Fact, objects: Sequence[str], rng: np.random.Generator) -> Passage:
    """Return a passage with an earlier object of `fact`; only one other word differs."""
    others = [thing for thing in objects if thing != fact.object]
    text = f"the {fact.relation} of {fact.subject} was {_draw(rng, others)} ."
    return Passage(fact.subject, text)
