"""What `info` says: the state, the action that was understood, what it brought and earned."""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_envs.core.contexts import View
from agent_envs.core.messages import StateMessages
from agent_envs.core.tool_calls import Call, describe_call
from agent_envs.formats.tool_formats import ParsedAction


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
    calls: Sequence[Call],
    terms: Mapping[str, float],
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Return what `info` holds after a step besides the state; see `ToolEnv`."""
    described: dict[str, Any] = {"action": parsed.as_info(), "tool_result": None}
    results = [call.result for call in calls if call.result is not None]
    if results:
        described["tool_result"] = "\n\n".join(result.content for result in results)
    if len(calls) == 1:
        described["action"] = describe_call(calls[0])
    elif calls:
        each = [describe_call(call) for call in calls]
        first_fault = next((call for call in each if "error" in call), {})
        described["action"] |= {"calls": each}
        described["action"] |= {k: first_fault[k] for k in ("error", "message") if first_fault}
        described["tool_results"] = [call.result and call.result.content for call in calls]
    return described | {"reward_terms": terms, "metrics": metrics}
