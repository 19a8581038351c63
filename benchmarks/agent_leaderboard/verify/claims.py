"""What a run says of its agents and nobody can play again: whether it makes sense.

That a model wrote the actions, and what it cost, stays on trust. But a name that is taken, an agent
of rules that used tokens, or a model that wrote a page in two tokens is no slip.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import AGENTS, acts_by_rules, build_agent, is_own
from agent_leaderboard.play.episodes import FAULTS
from agent_leaderboard.play.prepare import MODEL_PACKAGES, PACKAGES
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Protocol,
    make_slug,
)
from agent_leaderboard.records.names import look, look_alikes, unclear_names
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import ResultLine
from agent_leaderboard.verify.arguments import ARGUMENTS, shown
from agent_trainers import TINY_POLICY
from agent_trainers.trajectory import StopReason

SPEAKS_ITSELF: Final = frozenset(
    ("base_tool_call", "react", "checkpoint", "reflexion", "best_of_n")
)
"""Kinds of agents whose actions are a model's own words, a call for each."""
BYTES_PER_TOKEN: Final = 32
"""No tokenizer says more in a token, on average over a text without repeated characters."""
RECOUNT_TOLERANCE: Final = 0.8
"""What is counted again may be more than was sampled: text can be split otherwise."""
_RESERVED: Final = {
    look(word): (word, kind)
    for word, kind in {
        "oracle": "oracle", "random": "random", "rules": "heuristic", "heuristic": "heuristic",
    }.items()
}  # fmt: skip
_VERSION: Final = re.compile(r"[\w.+!-]{1,60}", re.ASCII)
_REPEATED: Final = re.compile(rb"(.)\1+", re.DOTALL)
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

Count = Callable[[str], int]


# Names and settings


def check_names(manifest: Manifest) -> Iterator[str]:
    """Yield names in a manifest that stand for something else, and settings no agent has."""
    for environment in manifest.environments:
        for text in (*_check_environment_name(environment), *_check_attack(environment, manifest)):
            yield f"manifest.json, environment {environment.slug!r}, {text}"
    known = {environment.slug for environment in manifest.environments}
    for agent in manifest.agents:
        for text in _check_agent(agent):
            yield f"manifest.json, agent {agent.slug!r}, {text}"
        for text in unclear_names(agent):
            yield f"manifest.json, agent {agent.slug!r}, {text}"
        if set(agent.not_played) - known or set(agent.not_played) == known:
            yield f"manifest.json, agent {agent.slug!r}, field 'not_played': is wrong"

    yield from (f"manifest.json, {text}" for text in look_alikes(manifest.agents))


def _check_environment_name(environment: EnvironmentRecord) -> Iterator[str]:
    own = re.sub(r"^.*/|-v\d+$", "", environment.id).lower()
    joined = re.sub(r"[^a-z0-9]", "", environment.slug)
    named = [name.lower() for name in ARGUMENTS if joined.startswith(name.lower())]
    if named and own not in named:
        yield f"field 'slug': {environment.slug!r} is the name of {named[0]}, not of {own}"


def _check_attack(environment: EnvironmentRecord, manifest: Manifest) -> Iterator[str]:
    """Yield why an environment is not the attack on another that it is said to be."""
    if (environment.attack is None) != (environment.attack_on is None):
        yield "fields 'attack' and 'attack_on': one is given without the other"
    if environment.attack == "edits" and not environment.kwargs.get("attack"):
        yield "field 'attack': is 'edits', but its arguments name no attacker"
    for plain in manifest.environments:  # it may be missing: a board has holes
        if plain.slug == environment.attack_on and (
            plain.attack_on is not None or plain.id != environment.id
        ):
            yield f"field 'attack_on': {plain.slug!r} is not the same without an attack"


def _check_agent(agent: AgentRecord) -> Iterator[str]:
    if agent.slug != make_slug(agent.name):
        yield f"field 'name': {shown(agent.name)} has another slug"
    for word in look(agent.name).split("-"):
        reserved, kind = _RESERVED.get(word, (word, agent.kind))
        if kind != agent.kind:
            yield f"field 'name': {reserved!r} names another kind of agent than {agent.kind!r}"
    if not is_own(agent.kind) and agent.kind not in AGENTS:
        yield f"field 'kind': there is no kind {shown(agent.kind)}"
        return
    if is_own(agent.kind):
        return
    yield from _check_model(agent)
    has_model = AGENTS[agent.kind].needs_model
    expected = {"python", *PACKAGES, *(MODEL_PACKAGES if has_model else ())}
    if set(agent.packages) != expected or not all(
        _VERSION.fullmatch(version) for version in agent.packages.values()
    ):
        yield f"field 'packages': must give a version of each of {', '.join(sorted(expected))}"


def _check_model(agent: AgentRecord) -> Iterator[str]:
    kind = AGENTS[agent.kind]
    if agent.tool_format != kind.format_for(agent.settings):
        yield f"field 'tool_format': is {shown(agent.tool_format)}, not that of {agent.kind!r}"
    if kind.needs_model != (agent.model is not None):
        yield f"field 'model': is {shown(agent.model)}, for an agent of the kind {agent.kind!r}"
        return
    of_a_model = ("weights_sha256", "train", "made_by", "prices")
    if not kind.needs_model and any(getattr(agent, name) for name in of_a_model):
        yield f"field {' or '.join(map(repr, of_a_model))}: an agent without a model has none"
    settings = dict(agent.settings) | ({"model": "none"} if kind.needs_model else {})
    try:
        if agent.kind != "checkpoint":  # which looks for its folder; its settings are those of all
            build_agent(agent.kind, settings)
        else:
            build_agent("base_tool_call", settings)
    except AgentEnvsError as error:
        yield f"field 'settings': {error}"
    if agent.model == TINY_POLICY.name and agent.train is None:
        truth = {path.name: file_sha256(path) for path in TINY_POLICY.glob("*.safetensors")}
        if agent.weights_sha256 != truth:
            yield "field 'weights_sha256': are not those of the embedded policy"


# Calls and tokens


def check_usage(
    line: ResultLine, agent: AgentRecord, protocol: Protocol, max_turns: int | None
) -> Iterator[str]:
    """Yield what an episode cannot have cost."""
    usage = line.usage
    numbers = {name: getattr(usage, name) for name in _COUNTED}
    for name, value in numbers.items():
        if value < 0:
            yield f"field 'usage.{name}': is negative"
    prices = agent.prices
    money = None if prices is None else prices.cost(usage.prompt_tokens, usage.completion_tokens)
    if usage.money != money:
        yield f"field 'usage.money': is {usage.money}, the prices give {money}"
    if (line.error is None) == (line.stop_reason in FAULTS):
        yield f"field 'error': is {line.error!r}, but 'stop_reason' is '{line.stop_reason}'"
    if acts_by_rules(agent.kind):
        if any(numbers.values()) or line.attempts:
            yield "field 'usage': an agent without a model calls none"
    elif not is_own(agent.kind):
        yield from _check_calls(line, agent, protocol, max_turns)


def _check_calls(
    line: ResultLine, agent: AgentRecord, protocol: Protocol, max_turns: int | None
) -> Iterator[str]:
    usage, turns = line.usage, sum(map(len, (line.actions, *line.attempts)))
    speaks = agent.kind in SPEAKS_ITSELF
    least = turns if speaks or agent.kind == "self_ask" else turns // 2  # others search by a plan
    least -= line.stop_reason is StopReason.CONTEXT_OVERFLOW  # found before the call
    if usage.calls < least:
        yield f"field 'usage.calls': is {usage.calls}; {turns} turns take at least {least}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(usage, name) < usage.calls:
            yield f"field 'usage.{name}': is {getattr(usage, name)} for {usage.calls} calls"
    trials = _num_attempts(agent)
    if agent.kind == "best_of_n" and len(line.attempts) != trials - 1 and line.error is None:
        yield f"field 'attempts': are {len(line.attempts)}; there must be {trials - 1}"
    elif len(line.attempts) > trials - 1:
        yield f"field 'attempts': are {len(line.attempts)}; there can be {trials - 1}"
    if max_turns is not None and trials == 1 and speaks:
        most = max_turns * (1 + protocol.max_retries)
        if usage.calls > most:
            yield f"field 'usage.calls': is {usage.calls}; there can be {most}"


def _num_attempts(agent: AgentRecord) -> int:
    defaults = {"reflexion": ("trials", 3), "best_of_n": ("samples", 5)}
    name, default = defaults.get(agent.kind, ("", 1))
    given: Any = agent.settings.get(name, default)
    return given if isinstance(given, int) else default


def check_tokens(
    line: ResultLine, agent: AgentRecord, written: str, question: str
) -> Iterator[str]:
    """Yield token counts below what text takes: all that was `written`, and the question a call."""
    if is_own(agent.kind) or acts_by_rules(agent.kind):
        return
    usage, count = line.usage, token_counter(_tokenizer_of(agent))
    least = {"prompt_tokens": math.floor(0.5 * usage.calls * count(question))}
    if agent.kind in SPEAKS_ITSELF:
        least["completion_tokens"] = math.floor(RECOUNT_TOLERANCE * count(written))
    for name, number in least.items():
        if getattr(usage, name) < number:
            claimed = getattr(usage, name)
            yield f"field 'usage.{name}': is {claimed}; the text alone takes {number}"


def _tokenizer_of(agent: AgentRecord) -> str:
    """Return the model whose tokenizer an agent has: a trained one that of what it began with."""
    if agent.train is None:
        return agent.model or ""
    return str(agent.train.get("model", TINY_POLICY.name))


@cache
def token_counter(model: str) -> Count:
    """Return what counts tokens: the model's tokenizer if it is on this machine, else a bound.

    A name of others opens no file: it stands for the embedded policy, or for a repository of the
    hub in this machine's cache.
    """
    from tokenizers import Tokenizer

    path: Any = TINY_POLICY / "tokenizer.json" if model == TINY_POLICY.name else None
    if path is None and _REPOSITORY.fullmatch(model):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, "tokenizer.json")
    if not path or not isinstance(path, str | type(TINY_POLICY)):
        return _bound
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(_encodable(text), add_special_tokens=False).ids)


def _bound(text: str) -> int:
    content = _REPEATED.sub(rb"\1", text.encode("utf-8", "surrogatepass"))
    return len(content) // BYTES_PER_TOKEN


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


_COUNTED: Final = ("calls", "prompt_tokens", "completion_tokens")
