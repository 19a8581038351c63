"""Plausibility of what cannot be replayed: names, settings, calls and tokens.

That a model wrote the actions, and at what cost, stays on trust. But a name that is taken, a rule
agent that used tokens, or a model that wrote a page in two tokens is wrong.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import (
    AGENTS,
    MODEL_SPEAKS,
    acts_by_rules,
    build_agent,
    is_custom,
)
from agent_leaderboard.play.environments import ENVIRONMENTS, shown
from agent_leaderboard.play.episodes import FAULTS
from agent_leaderboard.play.prepare import MODEL_PACKAGES, PACKAGES
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Protocol,
    differences,
    make_slug,
)
from agent_leaderboard.records.names import misleading_names, skeleton
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import EpisodeResult
from agent_trainers import TINY_POLICY
from agent_trainers.trajectory import StopReason

ATTEMPTS: Final = {"reflexion": ("trials", 3), "best_of_n": ("samples", 5)}
"""Setting with the number of attempts, and its default, by kind."""
BYTES_PER_TOKEN: Final = 32
"""Upper bound of the average over any text without repeated characters."""
RECOUNT_TOLERANCE: Final = 0.8
"""A recount may exceed the sampled tokens: text can be tokenised otherwise."""
_RESERVED: Final = {skeleton(kind): kind for kind in ("oracle", "random", "heuristic")} | {
    "rules": "heuristic"
}
"""Kind of agent that each reserved word of a name belongs to."""
_VERSION: Final = re.compile(r"[\w.+!-]{1,60}", re.ASCII)
_REPEATED: Final = re.compile(rb"(.)\1+", re.DOTALL)
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

Count = Callable[[str], int]


def check_names(manifest: Manifest, board: Sequence[AgentRecord] = ()) -> Iterator[str]:
    """Yield misleading names and impossible settings; agents of the `board` have taken names."""
    slugs = {environment.slug for environment in manifest.environments}
    for environment in manifest.environments:
        for text in _check_environment(environment, manifest):
            yield f"manifest.json, environment {environment.slug!r}, {text}"
    for agent in manifest.agents:
        for text in _check_agent(agent, slugs):
            yield f"manifest.json, agent {agent.slug!r}, {text}"
    for text in misleading_names([*board, *manifest.agents]):
        yield f"manifest.json, {text}"


def _check_environment(environment: EnvironmentRecord, manifest: Manifest) -> Iterator[str]:
    own = re.sub(r"^.*/|-v\d+$", "", environment.id).lower()
    joined = re.sub(r"[^a-z0-9]", "", environment.slug)
    named = [name.lower() for name in ENVIRONMENTS if joined.startswith(name.lower())]
    if named and own not in named:
        yield f"field 'slug': {environment.slug!r} is the name of {named[0]}, not of {own}"
    if (environment.attack is None) != (environment.attack_on is None):
        yield "fields 'attack' and 'attack_on': one is given without the other"
    if environment.attack == "edits" and not environment.kwargs.get("attack"):
        yield "field 'attack': is 'edits', but the arguments name no attacker"
    for plain in manifest.environments:  # it may be missing
        if plain.slug == environment.attack_on and (
            plain.attack_on is not None or plain.id != environment.id
        ):
            yield f"field 'attack_on': {plain.slug!r} is not the same without an attack"


def _check_agent(agent: AgentRecord, environments: Set[str]) -> Iterator[str]:
    if set(agent.not_played) - environments or set(agent.not_played) == environments:
        yield "field 'not_played': is wrong"
    if agent.slug != make_slug(agent.name):
        yield f"field 'name': {shown(agent.name)} has another slug"
    for word in skeleton(agent.name).split("-"):
        if (kind := _RESERVED.get(word, agent.kind)) != agent.kind:
            yield f"field 'name': names the kind {kind!r}, and is of another, {agent.kind!r}"
    if is_custom(agent.kind):
        return
    if agent.kind not in AGENTS:
        yield f"field 'kind': unknown kind {shown(agent.kind)}"
        return
    has_model = AGENTS[agent.kind].needs_model
    if has_model and agent.model is None:
        yield f"field 'model': an agent of the kind {agent.kind!r} has one"
    yield from differences(agent, _expected_record(agent))
    # `checkpoint` would look for its folder; it has the same settings as `base_tool_call`.
    checked = "base_tool_call" if agent.kind == "checkpoint" else agent.kind
    try:
        build_agent(checked, agent.settings | ({"model": "none"} if has_model else {}))
    except AgentEnvsError as error:
        yield f"field 'settings': {error}"
    expected = {"python", *PACKAGES, *(MODEL_PACKAGES if has_model else ())}
    if set(agent.packages) != expected or not all(map(_VERSION.fullmatch, agent.packages.values())):
        yield f"field 'packages': must give a version of each of {', '.join(sorted(expected))}"


def _expected_record(agent: AgentRecord) -> AgentRecord:
    """Return the record with all that follows from other fields."""
    kind = AGENTS[agent.kind]
    expected = replace(agent, tool_format=agent.settings.get("tool_format", kind.tool_format))
    if not kind.needs_model:
        return replace(
            expected, model=None, weights_sha256={}, train=None, made_by=None, prices=None
        )
    if agent.model == TINY_POLICY.name and agent.train is None:
        truth = {path.name: file_sha256(path) for path in TINY_POLICY.glob("*.safetensors")}
        return replace(expected, weights_sha256=truth)
    return expected


# Calls and tokens


def check_usage(
    result: EpisodeResult, agent: AgentRecord, protocol: Protocol, max_turns: int | None
) -> Iterator[str]:
    """Yield impossible costs of an episode."""
    prices = agent.prices
    money = None if prices is None else prices.cost(result.prompt_tokens, result.completion_tokens)
    if result.money != money:
        yield f"field 'money': is {result.money}, the prices give {money}"
    if (result.error is None) == (result.stop_reason in FAULTS):
        yield f"field 'error': is {result.error!r}, but 'stop_reason' is '{result.stop_reason}'"
    if acts_by_rules(agent.kind):
        if result.calls or result.prompt_tokens or result.completion_tokens or result.attempts:
            yield "field 'calls': an agent without a model makes none"
    elif not is_custom(agent.kind):
        yield from _check_calls(result, agent, protocol, max_turns)


def _check_calls(
    result: EpisodeResult, agent: AgentRecord, protocol: Protocol, max_turns: int | None
) -> Iterator[str]:
    turns = sum(map(len, (result.actions, *result.attempts)))
    speaks = agent.kind in MODEL_SPEAKS
    least = turns if speaks else turns // 2  # others search by a plan
    least -= result.stop_reason is StopReason.CONTEXT_OVERFLOW  # found before the call
    if result.calls < least:
        yield f"field 'calls': is {result.calls}; {turns} turns take at least {least}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(result, name) < result.calls:
            yield f"field {name!r}: is {getattr(result, name)} for {result.calls} calls"
    name, default = ATTEMPTS.get(agent.kind, ("", 1))
    given: Any = agent.settings.get(name)
    trials = given if isinstance(given, int) else default
    is_short = (
        agent.kind == "best_of_n" and result.error is None and len(result.attempts) < trials - 1
    )
    if is_short or len(result.attempts) > trials - 1:
        yield f"field 'attempts': are {len(result.attempts)}; there are {trials} in all"
    if max_turns is not None and trials == 1 and speaks:
        most = max_turns * (1 + protocol.max_retries)
        if result.calls > most:
            yield f"field 'calls': is {result.calls}; there can be {most}"


def check_tokens(
    result: EpisodeResult, agent: AgentRecord, written: str, question: str
) -> Iterator[str]:
    """Yield token counts below those of the text: all that was `written`, `question` per call."""
    if is_custom(agent.kind) or acts_by_rules(agent.kind):
        return
    # A trained model has the tokenizer of its base model.
    base = agent.model if agent.train is None else agent.train.get("model", TINY_POLICY.name)
    count = token_counter(str(base))
    least = {"prompt_tokens": math.floor(0.5 * result.calls * count(question))}
    if agent.kind in MODEL_SPEAKS:
        least["completion_tokens"] = math.floor(RECOUNT_TOLERANCE * count(written))
    for name, number in least.items():
        if getattr(result, name) < number:
            yield f"field {name!r}: is {getattr(result, name)}; the text alone takes {number}"


@cache
def token_counter(model: str) -> Count:
    """Return the model's token count if its tokenizer is on this machine, else a lower bound.

    The untrusted name opens no file, except the embedded policy's and those of the hub's cache.
    """
    from tokenizers import Tokenizer

    path: Any = TINY_POLICY / "tokenizer.json" if model == TINY_POLICY.name else None
    if path is None and _REPOSITORY.fullmatch(model):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, "tokenizer.json")
    if not isinstance(path, str | Path):
        return _bound
    tokenizer = Tokenizer.from_file(str(path))

    def count(text: str) -> int:
        plain = text.encode("utf-8", "replace").decode()
        return len(tokenizer.encode(plain, add_special_tokens=False).ids)

    return count


def _bound(text: str) -> int:
    content = _REPEATED.sub(rb"\1", text.encode("utf-8", "surrogatepass"))
    return len(content) // BYTES_PER_TOKEN
