"""Carry out the calls of one turn: side by side where they may be, answered in order."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from agent_envs.core.async_bridge import CallSession, Outcome
from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool, ToolResult, failed_call, late_call
from agent_envs.formats.actions import ParsedAction, ToolFormat

OVER_TEXT: Final = "This call was not carried out: the one before it ended the task."


class Call(NamedTuple):
    """A call of a turn, and what it brought."""

    action: ParsedAction
    """The call, or the mistake in it."""
    result: ToolResult | None
    """What the tool returned; None for a mistake."""


def run_calls(calls: Sequence[ParsedAction], tools: Mapping[str, Tool]) -> Iterator[ToolResult]:
    """Yield the result of each call, in order.

    A single call is run as it is. Of several, those of tools that keep no state begin at once, each
    in a thread of its own; the others run when their turn comes, one after the other. All together
    have the time that the most patient of their tools has alone.
    """
    if len(calls) == 1:
        yield tools[calls[0].name or ""].run(**(calls[0].arguments or {}))
        return
    session, ended = CallSession(), dict[int, Outcome]()
    called = [tools[call.name or ""] for call in calls]
    limits = [tool.timeout for tool in called if tool.timeout is not None]
    deadline = time.monotonic() + max(limits, default=math.inf)

    def start(i: int) -> None:
        run = partial(called[i].run, **(calls[i].arguments or {}))
        session.submit(i, run, max(0.0, deadline - time.monotonic()))

    for i, tool in enumerate(called):
        if tool.timeout is not None and not tool.stateful:
            start(i)
    for i, (call, tool) in enumerate(zip(calls, called, strict=True)):
        if tool.timeout is None:
            yield tool.run(**(call.arguments or {}))
            continue
        if tool.stateful:
            start(i)
        while i not in ended:
            ended |= {outcome.key: outcome for outcome in session.wait(math.inf)}
        yield _result(tool, ended[i])


def reply_to_calls(calls: Sequence[Call], tool_format: ToolFormat) -> list[Message]:
    """Return what the environment says to a turn of several calls: an answer to each, in order.

    Templates want users and models to take turns, so what is said as the user is one message.
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


def describe_call(call: Call) -> dict[str, Any]:
    """Return what `info` says of a call: what was understood, and what went wrong with it."""
    action, result = call
    described = action.as_info()
    if result is not None and result.error is not None:
        described |= {"error": result.error, "message": result.content}
    if result is not None and result.exception is not None:
        described["exception"] = result.exception
    if result is not None and result.num_cut_chars:
        described["num_cut_chars"] = result.num_cut_chars
    return described


def _result(tool: Tool, outcome: Outcome) -> ToolResult:
    if isinstance(outcome.error, TimeoutError):
        return late_call(tool, outcome.error)
    if outcome.error is not None:
        return failed_call(tool, outcome.error)
    result: ToolResult = outcome.value
    return result
