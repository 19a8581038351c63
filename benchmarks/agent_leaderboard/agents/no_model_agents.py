"""Agents without a model, as baselines.

`random`, the floor, makes valid calls, and answers, of words that it has read; `oracle`, the
ceiling, takes the reference actions; `heuristic` is the reach of the rules of `heuristics`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from agent_envs.core.tool_env import ToolEnv
from agent_envs.errors import ConfigurationError
from agent_leaderboard.agents.agent import Agent, MakeEnv, PlayedEpisode, collect, tool_env
from agent_leaderboard.agents.heuristics import next_action
from agent_trainers.policies import GenerationRequest, ScriptedPolicy
from agent_trainers.rollout.episode import EpisodeSpec

ANSWER_CHANCE: Final = 0.25
"""Probability that a random turn is an answer."""
_WORD: Final = re.compile(r"\w+")

Player = Callable[[GenerationRequest], str]
"""Acts in one episode; may have state."""


@dataclass(frozen=True, slots=True)
class ScriptedAgent(Agent):
    """An agent with one player per episode, made from an environment at its task."""

    make_player: Callable[[ToolEnv, EpisodeSpec], Player]

    def play(self, make_env: MakeEnv, specs: Sequence[EpisodeSpec]) -> list[PlayedEpisode]:
        """Run one episode per spec, in order."""
        players: list[Player] = []
        with closing(make_env()) as env:
            for spec in specs:
                env.reset(seed=spec.seed, options={"task": spec.task})
                players.append(self.make_player(tool_env(env), spec))
        policy = ScriptedPolicy(lambda request: players[request.episode_id](request))
        return [PlayedEpisode(trajectory=one) for one in collect(make_env, policy, specs)]


def _make_oracle(env: ToolEnv, spec: EpisodeSpec) -> Player:
    actions = iter(env.reference_actions())
    return lambda request: next(actions, env.write_answer("done"))


def _make_heuristic(env: ToolEnv, spec: EpisodeSpec) -> Player:
    def act(request: GenerationRequest) -> str:
        contents = [m["content"] for m in request.messages if m["role"] in ("user", "tool")]
        return next_action(env, contents[0], contents[1:])

    return act


def _make_random(env: ToolEnv, spec: EpisodeSpec) -> Player:
    tools = dict(env.tools)  # of this task: the environment goes on to the next

    def act(request: GenerationRequest) -> str:
        rng = spec.rng
        words = [w for m in request.messages[1:] for w in _WORD.findall(m["content"])] or ["0"]
        if not tools or rng.random() < ANSWER_CHANCE:
            return env.write_answer(_some_words(rng, words, 3))
        name = list(tools)[int(rng.integers(len(tools)))]
        properties = tools[name].parameters.get("properties", {})
        arguments = {key: _draw(rng, schema, words) for key, schema in properties.items()}
        return env.write_call(name, **arguments)

    return act


def make_agent(kind: str, settings: Mapping[str, Any]) -> ScriptedAgent:
    """Build an agent, which has no settings."""
    for name in settings:
        raise ConfigurationError(f"The agent {kind!r} has no settings, not {name}.")
    makers = {"random": _make_random, "heuristic": _make_heuristic, "oracle": _make_oracle}
    return ScriptedAgent(makers[kind])


def _draw(rng: np.random.Generator, schema: Mapping[str, Any], words: Sequence[str]) -> Any:
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
