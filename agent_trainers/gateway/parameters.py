"""Which parameters of a request are honoured, which change nothing, and which are refused.

Nothing is silently left out: what cannot be honoured is refused by name, unless the owner of the
gateway said that it counts for nothing (``ignored_parameters``).
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

from agent_trainers.gateway.api_error import refusal

HONOURED: Final[Mapping[str, Collection[str]]] = {
    "chat": (
        "model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "max_tokens",
        "max_completion_tokens", "stop", "seed", "stream", "stream_options", "logprobs",
    ),
    "responses": (
        "model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls",
        "max_output_tokens", "previous_response_id", "stream",
    ),
}  # fmt: skip
"""What is honoured, by endpoint."""

WITHOUT_EFFECT: Final = (
    "user", "metadata", "store", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "max_tool_calls",
)  # fmt: skip
"""What changes no reply, whatever its value."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "temperature": (),
    "top_p": (),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Values that ask for nothing special, of parameters that are refused otherwise. Those of the
policy's sampling (``temperature``, ``top_p``, …) come with the policy."""


def check_parameters(
    body: Mapping[str, Any],
    endpoint: str,
    *,
    sampling: Mapping[str, float],
    ignored: Collection[str],
) -> dict[str, Any]:
    """Return what is to be honoured of a request.

    Args:
        body: The request.
        endpoint: ``chat`` or ``responses``.
        sampling: How the policy samples, by the names of the API.
        ignored: Parameters that count for nothing.

    Raises:
        ApiError: If a parameter can neither be honoured nor left out.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in ignored or value is None or name in WITHOUT_EFFECT:
            continue
        if name in HONOURED[endpoint]:
            kept[name] = value
        elif name in sampling or name in NEUTRAL:
            _check_neutral(name, value, sampling)
        else:
            raise refusal(name, f"Unrecognized request argument supplied: {name}. {_WAYS_OUT}")
    return kept


_WAYS_OUT: Final = "Leave it out, or have it ignored: Gateway(…, ignored_parameters=[…])."


def _check_neutral(name: str, value: Any, sampling: Mapping[str, float]) -> None:
    neutral = (sampling[name],) if name in sampling else NEUTRAL[name]
    if any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        return
    said = f"The policy samples with {name}={sampling[name]:g}" if name in sampling else (
        f"{name} can only be {' or '.join(map(repr, neutral))}" if neutral else
        f"What the policy samples with is not known, so {name} cannot be honoured"
    )  # fmt: skip
    raise refusal(name, f"{said}; the request asks for {value!r:.100}. {_WAYS_OUT}")
