"""OpenEnv (``openenv-core``): our environments as its `Environment`, and its ones as ours.

OpenEnv's servers drop an observation's ``metadata``, so `TextObservation` has fields instead.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import pydantic
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.adapters.own_episode import OwnEpisode
from agent_envs.core.messages import Message

BAD_ACTION_TEXT: Final = (
    "This is not a valid action: {reason} Write a JSON object that fits {schema}."
)
_OWN_FIELDS: Final = frozenset({"done", "reward", "metadata"})
"""Fields of every observation of OpenEnv."""


class TextAction(Action):
    """One model turn."""

    text: str
    """The whole text the model wrote."""


class TextObservation(Observation):
    """An observation of ours; `done` is `terminated` or `truncated`."""

    text: str
    """The observation."""
    messages: list[dict[str, Any]]
    """The state: chat messages, ready for a chat template."""
    tools: list[dict[str, Any]]
    """Function schemas in the OpenAI format."""
    terminated: bool = False
    truncated: bool = False
    reward_terms: dict[str, float] = pydantic.Field(default_factory=dict)
    """Name -> weighted contribution; they sum to the reward."""
    info: dict[str, Any] = pydantic.Field(default_factory=dict)
    """The rest of `info`: the parsed action, the tool's result, the metrics."""


class OwnEnvironment(Environment[TextAction, TextObservation, State]):
    """An environment of ours as one of OpenEnv's."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, id: str, **kwargs: Any) -> None:
        """Make the environment as ``gymnasium.make(id, **kwargs)`` does."""
        super().__init__()
        self._episode = OwnEpisode(id, kwargs)
        self._state = State()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task: int | None = None,
    ) -> TextObservation:
        """Begin an episode of a task index or a drawn task; `episode_id` is its name in `state`."""
        self._episode.reset(seed=seed, task=task)
        self._state = State(episode_id=episode_id)
        return self._observe(reward=None)

    def step(self, action: TextAction, timeout_s: float | None = None) -> TextObservation:
        """Take one model turn; `timeout_s` is ignored, since tools have timeouts."""
        self._episode.step(action.text)
        self._state.step_count = self._episode.num_turns
        return self._observe(reward=self._episode.reward)

    @property
    def state(self) -> State:
        """The state of the episode."""
        return self._state

    def close(self) -> None:
        """Close the environment."""
        self._episode.close()

    def _observe(self, reward: float | None) -> TextObservation:
        episode, info = self._episode, dict(self._episode.info)
        return TextObservation(
            done=episode.is_over,
            reward=reward,
            text=episode.observation,
            messages=list(info.pop("messages")),
            tools=list(info.pop("tools")),
            terminated=episode.terminated,
            truncated=episode.truncated,
            reward_terms=dict(info.pop("reward_terms", {})),
            info=info,
        )


class OpenEnvEnv(ForeignEnv):
    """An environment of OpenEnv as one of ours. A task is a seed of its reset.

    An action is a JSON object that fits `action_class`, or the text of its only required field. An
    invalid one is answered with the reason.
    """

    def __init__(
        self,
        *,
        make: Callable[[], Environment[Any, Any, Any]],
        action_class: type[Action],
    ) -> None:
        """Make the environment; `make` is its class, `action_class` that of its actions."""
        super().__init__(getattr(make, "__name__", "OpenEnv"))
        self._action_class = action_class
        fields = action_class.model_fields.items()
        own = {n: f for n, f in fields if n != "metadata"}
        needed = [name for name, field in own.items() if field.is_required()] or list(own)
        is_text = len(needed) == 1 and own[needed[0]].annotation is str
        self._text_field = needed[0] if is_text else None
        self._env = make()

    def begin(self, task: int) -> list[Message]:
        """Begin the episode of a seed."""
        return [Message(role="user", content=_show(self._env.reset(seed=task)))]

    def act(self, action: str) -> Reply:
        """Take one model turn."""
        try:
            parsed = self._parse(action)
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}." if place else f"{first['msg']}."
            schema = json.dumps(self._action_class.model_json_schema())
            return Reply(text=BAD_ACTION_TEXT.format(reason=reason, schema=schema))
        observation = self._env.step(parsed)
        terminated = bool(getattr(observation, "terminated", observation.done))
        reward = float(observation.reward or 0.0)
        terms: Mapping[str, float] | None = getattr(observation, "reward_terms", None)
        return Reply(
            text=_show(observation),
            reward=reward,
            reward_terms=terms,
            terminated=terminated,
            truncated=bool(getattr(observation, "truncated", observation.done and not terminated)),
        )

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _parse(self, action: str) -> Action:
        if self._text_field is not None:
            return self._action_class(**{self._text_field: action})
        return self._action_class.model_validate_json(action)


def _show(observation: Observation) -> str:
    """Return an observation's ``text``, its only field, or all fields as JSON."""
    fields = observation.model_dump(mode="json", exclude=set(_OWN_FIELDS))
    if isinstance(fields.get("text"), str):
        return str(fields["text"])
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False)
