"""Run the calls of one turn, concurrently where possible, and describe them in `info`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from agent_envs.core.async_bridge import CallSession
from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool, ToolResult
from agent_envs.formats.actions import ParsedAction, ToolFormat

OVER_TEXT: Final = "This call was not carried out: the one before it ended the task."


class Call(NamedTuple):
    """A call of a turn, or the mistake in it, and its result; None for a mistake."""

    action: ParsedAction
    result: ToolResult | None


def run_calls(calls: Sequence[ParsedAction], tools: Mapping[str, Tool]) -> Iterator[ToolResult]:
    """Yield the result of each call, in order.

    Of several calls, those of tools without state start at once, each in its own thread; the others
    run one after the other.
    """
    session, ended = CallSession(), dict[int, ToolResult]()
    runs = [partial(tools[call.name or ""].run, **(call.arguments or {})) for call in calls]
    concurrent = set()
    for i, tool in enumerate(tools[call.name or ""] for call in calls):
        if len(calls) > 1 and tool.timeout is not None and not tool.stateful:
            session.submit(i, runs[i])
            concurrent.add(i)
    for i, run in enumerate(runs):
        while i in concurrent and i not in ended:
            ended |= {outcome.key: outcome.value for outcome in session.wait(math.inf)}
        yield ended[i] if i in concurrent else run()


def reply_to_calls(calls: Sequence[Call], tool_format: ToolFormat) -> list[Message]:
    """Return the results of several calls as messages, in order.

    Templates require that users and models alternate, so user messages are joined to one.
    """
    replies: list[Message] = []
    for number, (action, result) in enumerate(calls, start=1):
        content = (action.message or "") if result is None else result.content
        message = tool_format.result_message(action.name or f"call {number}", content)
        if replies and message["role"] != "tool" and replies[-1]["role"] == message["role"]:
            both = f"{replies[-1]['content']}\n\n{message['content']}"
            replies[-1] = {**replies[-1], "content": both}
        else:
            replies.append(message)
    return replies


def describe_step(
    parsed: ParsedAction,
    calls: Sequence[Call],
    terms: Mapping[str, float],
    metrics: Mapping[str, float],
) -> dict[str, Any]:
    """Return the keys of `info` that a step adds to the state; see `ToolEnv`."""
    action = parsed.as_info()
    described: dict[str, Any] = {"action": action, "tool_result": None}
    each = action.get("calls", [action])
    results = [call.result for call in calls]
    for info, result in zip(each, results, strict=False):  # without calls there is no result
        if result is None:
            continue
        if result.error is not None:
            info |= {"error": result.error, "message": result.content}
        if result.exception is not None:
            info["exception"] = result.exception
        if result.num_cut_chars:
            info["num_cut_chars"] = result.num_cut_chars
    if contents := [result.content for result in results if result is not None]:
        described["tool_result"] = "\n\n".join(contents)
    if len(calls) > 1:
        first_fault: dict[str, Any] = next((info for info in each if "error" in info), {})
        action |= {key: first_fault[key] for key in ("error", "message") if first_fault}
        described["tool_results"] = [result and result.content for result in results]
    return described | {"reward_terms": terms, "metrics": metrics}
