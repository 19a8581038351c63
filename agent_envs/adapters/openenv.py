"""OpenEnv (``openenv-core``): its environments as ours; `agent_envs.remote` serves ours to it."""

import json
from collections.abc import Callable
from typing import Any, Final

import pydantic
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation

from agent_envs.adapters.foreign import ForeignEnv, Reply
from agent_envs.core.messages import Message

BAD_ACTION_TEXT: Final = (
    "This is not a valid action: {reason} Write a JSON object that fits {schema}."
)
_OWN_FIELDS: Final = frozenset({"done", "reward", "metadata"})
"""Fields of every observation of OpenEnv."""


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
        return [Message(role="user", content=_show(self._env.reset(seed=task)))]

    def act(self, action: str) -> Reply:
        try:
            if self._text_field is None:
                parsed = self._action_class.model_validate_json(action)
            else:
                parsed = self._action_class(**{self._text_field: action})
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}." if place else f"{first['msg']}."
            schema = json.dumps(self._action_class.model_json_schema())
            return Reply(text=BAD_ACTION_TEXT.format(reason=reason, schema=schema))
        observation = self._env.step(parsed)
        reward = float(observation.reward or 0.0)
        return Reply(text=_show(observation), reward=reward, terminated=bool(observation.done))

    def close(self) -> None:
        self._env.close()


def _show(observation: Observation) -> str:
    """Return the text in an observation's only field, or all fields as JSON."""
    fields = observation.model_dump(mode="json", exclude=set(_OWN_FIELDS))
    if len(fields) == 1 and isinstance(text := next(iter(fields.values())), str):
        return text
    return json.dumps(fields, ensure_ascii=False)
