"""What `info` says: the state, the action that was understood, what it brought and earned."""

from collections.abc import Mapping
from typing import Any

from agent_envs.core.contexts import View
from agent_envs.core.messages import StateMessages
from agent_envs.core.tool import ToolResult
from agent_envs.core.tool_formats import ParsedAction


def describe_state(view: View) -> dict[str, Any]:
    """Return the messages of a state, and ``context`` where it leaves something out."""
    messages = view.messages
    if not isinstance(messages, StateMessages):
        messages = StateMessages(messages)
    described: dict[str, Any] = {"messages": messages}
    if view.reason is not None:
        shown = ("num_dropped", "num_shortened", "reason")
        described["context"] = {name: getattr(view, name) for name in shown}
    return described


def describe_step(
    parsed: ParsedAction,
    result: ToolResult | None,
    terms: Mapping[str, float],
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Return what `info` holds after a step besides the state; see `ToolEnv`."""
    action = parsed.as_info()
    if result is not None:
        if result.error is not None:
            action |= {"error": result.error, "message": result.content}
        if result.exception is not None:
            action["exception"] = result.exception
        if result.num_cut_chars:
            action["num_cut_chars"] = result.num_cut_chars
    return {
        "action": action,
        "tool_result": None if result is None else result.content,
        "reward_terms": terms,
        "metrics": metrics,
    }
