"""Agents without a model, as baselines.

`random_agent` is the floor, `oracle_agent` the ceiling (the reference actions), and
`heuristic_agent` the reach of a few rules.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np

from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import PlayedEpisode, tool_env
from agent_leaderboard.agents.heuristics import next_action
from agent_trainers.policies import GenerationRequest, ScriptedPolicy
from agent_trainers.rollout.collector import Rollout
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.episode import EpisodeSpec

ANSWER_CHANCE: Final = 0.25
"""Probability that a random turn is an answer."""
_WORD: Final = re.compile(r"\w+")

Player = Callable[[GenerationRequest], str]
"""Acts in one episode; may have state."""
MakePlayer = Callable[[ToolEnv, EpisodeSpec], Player]


class ScriptedAgent:
    """An agent with one player per episode."""

    def __init__(self, make_player: MakePlayer) -> None:
        """Make a player for each episode, from an environment at its task."""
        self._make_player = make_player

    def check(self, make_env: Callable[[], TextEnv]) -> None:
        """Accept every environment with tools."""

    def play(
        self, make_env: Callable[[], TextEnv], specs: Sequence[EpisodeSpec]
    ) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        env = make_env()
        base = tool_env(env)
        players: list[Player] = []
        for spec in specs:
            env.reset(seed=spec.seed, options=None if spec.task is None else {"task": spec.task})
            players.append(self._make_player(base, spec))
        env.close()
        policy = ScriptedPolicy(lambda request: players[request.episode_id](request))
        with closing(Rollout(make_env, policy)) as rollout:
            return [PlayedEpisode(trajectory=played) for played in rollout.collect(specs)]


def _make_oracle(env: ToolEnv, spec: EpisodeSpec) -> Player:
    actions = iter(env.reference_actions())
    return lambda request: next(actions, env.write_answer("done"))


def _make_heuristic(env: ToolEnv, spec: EpisodeSpec) -> Player:
    def act(request: GenerationRequest) -> str:
        contents = [m["content"] for m in request.messages if m["role"] in ("user", "tool")]
        return next_action(env, contents[0], contents[1:])

    return act


def _make_random(env: ToolEnv, spec: EpisodeSpec) -> Player:
    def act(request: GenerationRequest) -> str:
        rng = spec.rng
        words = [w for m in request.messages[1:] for w in _WORD.findall(m["content"])] or ["0"]
        if not env.tools or rng.random() < ANSWER_CHANCE:
            return env.write_answer(_some_words(rng, words, 3))
        name = list(env.tools)[int(rng.integers(len(env.tools)))]
        properties = env.tools[name].parameters.get("properties", {})
        arguments = {key: _draw(rng, schema, words) for key, schema in properties.items()}
        return env.write_call(name, **arguments)

    return act


def _builder(kind: str, make_player: MakePlayer) -> Callable[[Mapping[str, Any]], ScriptedAgent]:
    def build(settings: Mapping[str, Any]) -> ScriptedAgent:
        if settings:
            names = ", ".join(settings)
            raise ConfigurationError(f"The agent {kind!r} has no settings, not {names}.")
        return ScriptedAgent(make_player)

    return build


oracle_agent = _builder("oracle", _make_oracle)
"""Takes the reference actions."""
heuristic_agent = _builder("heuristic", _make_heuristic)
"""Follows the rules of `heuristics`."""
random_agent = _builder("random", _make_random)
"""Makes valid calls, and answers, of words that it has read."""


def _draw(rng: np.random.Generator, schema: Mapping[str, Any], words: Sequence[str]) -> Any:
    """Draw a value of a JSON schema; text from `words`."""
    if "anyOf" in schema:
        return _draw(rng, schema["anyOf"][0], words)
    if "enum" in schema:
        return schema["enum"][int(rng.integers(len(schema["enum"])))]
    match schema.get("type"):
        case "integer" | "number":
            read = [int(word) for word in words if word.isascii() and word.isdigit()]
            return read[int(rng.integers(len(read)))] if read else int(rng.integers(100))
        case "boolean":
            return bool(rng.integers(2))
        case "array":
            return [_draw(rng, schema.get("items", {}), words)]
        case "object":
            return {}
        case _:
            return _some_words(rng, words, 4)


def _some_words(rng: np.random.Generator, words: Sequence[str], most: int) -> str:
    start, count = int(rng.integers(len(words))), int(rng.integers(1, most + 1))
    return " ".join(words[start : start + count])
