"""Plausibility of what replay does not decide: names, settings, strategies, calls and tokens.

That a model wrote the actions stays on trust, and often their cost. But a name that is taken, a
vote for another answer, a search that the strategy does not make, or tokens that do not fit the
text are wrong.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

from agent_envs.errors import AgentEnvsError
from agent_leaderboard.agents.agent import (
    AGENTS,
    MODEL_SPEAKS,
    acts_by_rules,
    build_agent,
    is_custom,
    is_recounted,
)
from agent_leaderboard.agents.model_agents import DEFAULT_MAX_NEW_TOKENS
from agent_leaderboard.play.environments import ENVIRONMENTS, shown
from agent_leaderboard.play.episodes import FAULTS, ReplayedEpisode
from agent_leaderboard.play.prepare import LOCAL_SETTINGS, MODEL_PACKAGES, PACKAGES
from agent_leaderboard.records.manifest import (
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    differences,
    make_slug,
)
from agent_leaderboard.records.names import misleading_names
from agent_leaderboard.records.reading import file_sha256
from agent_leaderboard.records.results import EpisodeResult
from agent_trainers import TINY_POLICY
from agent_trainers.rollout.evaluation import answers_of, majority
from agent_trainers.trajectory import StopReason

SEARCHES: Final = {"naive_rag": 1, "iterative_rag": 3}
"""Searches before the answer, by kind; a setting wins."""
ATTEMPTS: Final = {"reflexion": ("trials", 3), "best_of_n": ("samples", 5)}
"""Setting with the number of attempts, and its default, by kind."""
BYTES_PER_TOKEN: Final = 32
"""Upper bound of the average over any text without repeated characters."""
RECOUNT_TOLERANCE: Final = 0.8
"""A recount may exceed the sampled tokens: text can be tokenised otherwise."""
EXACT_TOLERANCE: Final = 0.05
"""Largest relative error of a recount with tokenizer and template, or one token per call."""
MAX_TURN_TOKENS: Final = 2**15
"""Longest turn of a trained model, whose recipe is not known here."""
_MARK: Final = "\ue000"
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
    attack, variant = (environment.kwargs.get(name) for name in ("attack", "variant"))
    expected = "injection" if variant == "injected" else None
    if attack:  # that of AgentDojo is the name of a planted text
        expected = "AgentDojo" if isinstance(attack, str) else "edits"
    if environment.attack != expected:
        yield f"field 'attack': is {shown(environment.attack)}, the arguments give {expected!r}"
    added = "attack" if attack else "variant"
    plain_kwargs = {k: v for k, v in environment.kwargs.items() if k != added}
    for plain in manifest.environments:  # it may be missing
        if plain.slug == environment.attack_on and (
            (plain.attack_on, plain.id, plain.kwargs) != (None, environment.id, plain_kwargs)
        ):
            yield f"field 'attack_on': {plain.slug!r} is not the same without an attack"


def _check_agent(agent: AgentRecord, environments: Set[str]) -> Iterator[str]:
    if set(agent.not_played) - environments or set(agent.not_played) == environments:
        yield "field 'not_played': is wrong"
    if agent.slug != make_slug(agent.name):
        yield f"field 'name': {shown(agent.name)} has another slug"
    for name in sorted(agent.settings.keys() & set(LOCAL_SETTINGS)):
        yield f"field 'settings': {name!r} is not recorded"
    if is_custom(agent.kind):
        return
    if agent.kind not in AGENTS:
        yield f"field 'kind': unknown kind {shown(agent.kind)}"
        return
    has_model = AGENTS[agent.kind].needs_model
    if has_model and agent.model is None:
        yield f"field 'model': an agent of the kind {agent.kind!r} has one"
    if agent.train is not None and not agent.weights_sha256:
        yield "field 'train': a trained model has 'weights_sha256'"
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
        return replace(expected, weights_sha256=truth, made_by=None)
    return expected


# Calls and tokens


def check_usage(result: EpisodeResult, agent: AgentRecord) -> Iterator[str]:
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
        yield from _check_calls(result, agent)


def _check_calls(result: EpisodeResult, agent: AgentRecord) -> Iterator[str]:
    """Yield impossible numbers; a run that was resumed often may have any number of calls."""
    turns = sum(map(len, (result.actions, *result.attempts)))
    least = turns if agent.kind in MODEL_SPEAKS else turns // 2  # others search by a plan
    least -= result.stop_reason is StopReason.CONTEXT_OVERFLOW  # found before the call
    if result.calls < least:
        yield f"field 'calls': is {result.calls}; {turns} turns take at least {least}"
    for name in ("prompt_tokens", "completion_tokens"):
        if getattr(result, name) < result.calls:
            yield f"field {name!r}: is {getattr(result, name)} for {result.calls} calls"
    longest = agent.settings.get("max_new_tokens")
    if not isinstance(longest, int):  # a local model may have a recipe
        longest = MAX_TURN_TOKENS if agent.weights_sha256 else DEFAULT_MAX_NEW_TOKENS
    if result.completion_tokens > (most := longest * result.calls):
        yield f"field 'completion_tokens': is {result.completion_tokens}; there can be {most}"
    name, default = ATTEMPTS.get(agent.kind, ("", 1))
    given: Any = agent.settings.get(name)
    trials = given if isinstance(given, int) else default
    is_over = result.error is not None or (agent.kind == "reflexion" and result.success)
    is_short = len(result.attempts) < trials - 1 and not is_over
    if is_short or len(result.attempts) > trials - 1:
        yield f"field 'attempts': are {len(result.attempts)}; there are {trials} in all"


def check_strategy(
    result: EpisodeResult, agent: AgentRecord, again: ReplayedEpisode
) -> Iterator[str]:
    """Yield attempts and actions that an agent of this kind does not make with any model."""
    if agent.kind == "best_of_n" and result.error is None:
        counted, *others = [answers_of(step.info for step in own[1:]) for own in again.rounds]
        # The place of the attempt that counts is not recorded.
        places = range(len(again.rounds))
        if not any(majority([*others[:k], counted, *others[k:]]) == k for k in places):
            yield "field 'attempts': another answer is the most frequent one"
    if agent.kind == "reflexion" and any(
        own[-1].info.get("metrics", {}).get("success") for own in again.rounds[1:]
    ):
        yield "field 'attempts': reflexion ends with the first success"
    if agent.kind in SEARCHES:
        most = agent.settings.get("iterations", SEARCHES[agent.kind])
        yield from _check_searches(result, again, most)


def _check_searches(result: EpisodeResult, again: ReplayedEpisode, most: int) -> Iterator[str]:
    """Yield the first action that is not the next one of `SearchStrategy`."""
    write, question, searches, calls = again.tool_format, "", 0, 0
    actions = again.attempts[0]
    if result.stop_reason in (StopReason.CONTEXT_OVERFLOW, StopReason.TOKEN_LIMIT):
        actions = actions[:-1]  # cut off
    for number, (step, action) in enumerate(zip(again.rounds[0], actions, strict=False), start=1):
        messages = step.info["messages"]
        if not any(message["role"] == "assistant" for message in messages):
            question, searches = messages[-1]["content"], 0
        first = write.write_call("search", {"query": question})
        later = write.write_call("search", {"query": f"{_MARK} {question}".rstrip()})
        calls += searches > 0
        if searches == 0:
            fits = action == first
        elif searches < most:
            fits = _matches(action, later) or action == write.write_call(
                "search", {"query": question.strip()}
            )
        else:
            fits = _matches(action, write.write_answer(_MARK))
        searches += searches < most
        if not fits:
            yield f"field 'actions': action {number} is not that of the strategy"
            return
    if result.calls < calls:
        yield f"field 'calls': is {result.calls}; the strategy takes at least {calls}"


def _matches(action: str, pattern: str) -> bool:
    """Return whether an action is the pattern, with any text for `_MARK`."""
    start, end = pattern.split(_MARK)
    is_long = len(action) >= len(start) + len(end)
    return is_long and action.startswith(start) and action.endswith(end)


def check_tokens(
    result: EpisodeResult, agent: AgentRecord, again: ReplayedEpisode
) -> Iterator[str]:
    """Yield token counts that do not fit the text: exactly where the tokenizer is in the package.

    Otherwise they are lower bounds, by the model's tokenizer if it is on this machine.
    """
    if is_custom(agent.kind):
        return
    turns = [
        (step.info, action)
        for steps, actions in zip(again.rounds, again.attempts, strict=False)
        for step, action in zip(steps, actions, strict=False)
    ]
    if is_recounted(agent):
        renderer = _renderer()
        truth = {
            "prompt_tokens": sum(
                renderer.count_tokens(info["messages"], info["tools"]) for info, _ in turns
            ),
            "completion_tokens": sum(len(renderer.turn_ids(action)) for _, action in turns),
        }
        for name, number in truth.items():
            recorded, error = getattr(result, name), max(EXACT_TOLERANCE * number, len(turns))
            is_above = result.calls <= len(turns) and recorded > number + error  # no retry
            if recorded < number - error or is_above:
                yield f"field {name!r}: is {recorded}; counted again, it is {number}"
        return
    count = token_counter(str(agent.model))
    states = [again.question] * result.calls
    least = {}
    if agent.kind in MODEL_SPEAKS:
        states = [
            "\n".join(message["content"] for message in info["messages"]) for info, _ in turns
        ]
        written = "\n".join(chain(*again.attempts))
        least["completion_tokens"] = math.floor(RECOUNT_TOLERANCE * count(written))
    least["prompt_tokens"] = math.floor(0.5 * sum(map(count, states)))
    for name, number in least.items():
        if getattr(result, name) < number:
            yield f"field {name!r}: is {getattr(result, name)}; the text alone takes {number}"


@cache
def _renderer() -> Any:
    from agent_trainers.policies.models import load_tokenizer
    from agent_trainers.policies.rendering import ChatRenderer

    return ChatRenderer(load_tokenizer(str(TINY_POLICY)))


@cache
def token_counter(model: str) -> Count:
    """Return the model's token count if its tokenizer is on this machine, else a lower bound.

    The untrusted name opens no file, except those of the hub's cache.
    """
    from tokenizers import Tokenizer

    path: Any = None
    if _REPOSITORY.fullmatch(model):
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
