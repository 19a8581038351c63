"""Simulated users: a script made from the facts of a task, and a model behind an endpoint.

A user is a function of the task's instructions and the conversation so far, whose roles are those
of the agent (``assistant``) and the user. It returns what the user says next. A mark as
in `STOP` ends the conversation.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from agent_envs.core.lookup import lookup_or_import
from agent_envs.core.messages import Message
from agent_envs.core.model_server import ServerClient
from agent_envs.errors import ConfigurationError

Instructions = Mapping[str, Any]
"""Texts in the second person, by the names of tau2: ``reason_for_call``, ``known_info``,
``unknown_info``, ``task_instructions``."""
User = Callable[[Instructions, Sequence[Message]], str | Awaitable[str]]

STOP: Final = re.compile("###(STOP|TRANSFER|OUT-OF-SCOPE)###")
"""As in tau2: the request is fulfilled, the user is transferred, or the facts do not suffice."""
TRANSFERRED: Final = "transferred to a human"
CONFIRM_TEXT: Final = "Yes, please go ahead."
NOTHING_MORE_TEXT: Final = "I have nothing to add."
PROMPT: Final = """You are a customer who contacts a representative of a company.
Write one short message at a time, and nothing else. Follow the instructions below, but do not
repeat them, do not give all information at once, and do not invent any. If everything in them is
done, write ###STOP###; if you are transferred to another person, ###TRANSFER###; if they do not
suffice to continue, ###OUT-OF-SCOPE###.

"""
_PERSONS: Final = {
    "you are": "I am", "you're": "I'm", "you were": "I was", "you name": "my name",
    "yourself": "myself", "yours": "mine", "your": "my", "you": "I",
}  # fmt: skip
_PERSON: Final = re.compile(rf"\b(?:{'|'.join(_PERSONS)})\b", re.IGNORECASE)
_OBJECT: Final = re.compile(
    r"(?i)\b((?:allows?|asks?|for|from|gives?|lets?|offers?|of|tells?|to|told|with) )?"
    r"you\b(?(1)|(?=[.,;!?]|$| for\b))"
)
_SECRET: Final = re.compile(
    r"(?i)^(?!.*\bunless\b).*(\breveal|(\bnot|n't|\bnever)\b.*\b(share|mention|say|provide)\b)"
)
_CONFIRM: Final = re.compile(r"(?i)\b(confirm|proceed|go ahead|yes)\b")
_IDENTITY: Final = re.compile(r"(?i)\b(names?|zip|e-?mail|id|identity|who)\b")
_COMMON: Final = frozenset(
    "about also and any are but can could did does for from get give has have help how know like "
    "may more need not only our please she should than that the their them then there they this "
    "want was were what when which will with would yes you your".split()
)


def script_user(instructions: Instructions, conversation: Sequence[Message]) -> str:
    """Say the reason for the call, and then the facts that the agent asks for.

    A fact is a sentence of the instructions, in the first person, or all that is known of the user.
    It appears once, when a message of the agent has a word of it, or when no other one has. A
    request for confirmation is granted. Conditions are quoted, not followed, and sentences on what
    the user conceals are left out: a weaker user than a model, but the same for all agents.
    """
    said = "\n".join(each["content"] for each in conversation if each["role"] == "user")
    if not said:
        reasons = _facts(instructions, "reason_for_call")
        direct = [fact for fact in reasons if "agent" not in fact.lower()]
        return " ".join(["Hello.", *(direct or reasons)])
    message = conversation[-1]["content"]
    if TRANSFERRED in message.lower():
        return "###TRANSFER###"
    identity = " ".join(_facts(instructions, "known_info"))
    others = ("unknown_info", "reason_for_call", "task_instructions")
    facts = [identity, *(fact for kind in others for fact in _facts(instructions, kind))]
    facts, asked = [fact for fact in facts if fact not in said], _stems(message)
    wanted = [fact for fact in facts if asked & _stems(fact)]
    if identity in facts and identity not in wanted and _IDENTITY.search(message):
        wanted.insert(0, identity)
    if wanted or not _CONFIRM.search(message):
        return " ".join(wanted or facts[:1]) or NOTHING_MORE_TEXT
    return CONFIRM_TEXT


def _facts(instructions: Instructions, kind: str) -> list[str]:
    sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n", instructions.get(kind) or "")
    kept = (s.strip() for s in sentences if re.search(r"\w", s) and not _SECRET.search(s))
    return [_PERSON.sub(_in_first_person, _OBJECT.sub(r"\1me", fact)) for fact in kept]


def _in_first_person(match: re.Match[str]) -> str:
    word = _PERSONS[match[0].lower()]
    return word[0].upper() + word[1:] if match[0][0].isupper() else word


def _stems(text: str) -> set[str]:
    """Return the beginnings of the words of a text that are not common."""
    return {w[:5] for w in re.findall(r"[a-z0-9_#]{3,}", text.lower()) if w not in _COMMON}


class UserModel:
    """A language model on an OpenAI-compatible server as the user; needs the extra ``openai``."""

    def __init__(
        self, *, base_url: str, model: str, api_key_env: str | None = None, **request: Any
    ) -> None:
        """Prepare the connection, as for `ServerClient`; `request`: more arguments of requests."""
        self._client = ServerClient(base_url, model=model, api_key_env=api_key_env)
        self._request = {"model": model, **request}

    def __call__(self, instructions: Instructions, conversation: Sequence[Message]) -> str:
        """Return the next message; a ServerError, which leaves the episode unscored, if none."""
        texts = (f"{name}: {text}" for name, text in instructions.items() if text)
        messages = [{"role": "system", "content": PROMPT + "\n".join(texts)}]
        roles = {"assistant": "user", "user": "assistant"}
        messages += [{"role": roles[m["role"]], "content": m["content"]} for m in conversation]
        reply = self._client.chat(messages=messages, **self._request)
        if not (text := reply.choices[0].message.content):
            raise self._client.error("the model of the user gave no reply")
        return str(text.strip())


def make_user(user: User | str | Mapping[str, Any]) -> User:
    """Return the user of a name, an import path or arguments of `UserModel`, or `user` itself."""
    table: dict[str, User] = {"script": script_user}
    function: User = make_function(user, table, UserModel, kind="user")
    return function


def make_function(
    value: Any, table: Mapping[str, Any], connect: Callable[..., Any], *, kind: str
) -> Any:
    """Return the function of a name, an import path or arguments of `connect`, or `value` itself.

    Raises:
        ConfigurationError: If it is none of these.
    """
    if isinstance(value, str):
        return lookup_or_import(table, value, kind=kind)
    if isinstance(value, Mapping):
        try:
            return connect(**value)
        except TypeError as error:
            raise ConfigurationError(
                f"{kind}={value!r}: {error}. A model needs base_url and model."
            ) from None
    if not callable(value):
        raise ConfigurationError(
            f"{kind}={value!r}: pass a function, its import path, or base_url and model of a model."
        )
    return value
