"""OpenAI-compatible APIs: structured calls as a tool format, and states as messages.

An action of `OpenAIFormat` is a message of the assistant as text: ``{"tool_calls": [{"function":
{"name": …, "arguments": …}}]}``, or plain text, which is the answer. With every other format the
API's calls are written back as text. Messages of environments have no call ids: calls are numbered
by their place, so that equal states are equal requests. A server renders the chat template itself,
so control tokens in texts are broken up (`break_control_strings`).
"""

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.core.tool import Tool
from agent_envs.formats.actions import (
    ANSWER_EXAMPLE,
    ANSWER_EXAMPLE_TEXT,
    BAD_CALL_TEXT,
    END_OF_THOUGHT,
    MAX_CALLS,
    STRICT_JSON,
    ParsedAction,
    Span,
    ToolFormat,
    find_spans,
    skip_space,
    without_thoughts,
)
from agent_envs.formats.control_strings import Author, break_control_strings

CALL_FUNCTION_TEXT: Final = "To call a tool, call one of the functions {names}. "
ANSWER_IN_TEXT: Final = "To answer, write nothing but the answer, without a call."
_MARKUP: Final = "<(?P<tag>answer|tool_call)>"

# From the chat templates of Qwen2.5 and Qwen3, for requests without tools.
HERMES_TOOLS_TEXT: Final = """

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

ApiMessage = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """One structured call: name, and the model's JSON text, which may be malformed."""

    name: str
    arguments: str


def write_message(content: str, calls: Sequence[FunctionCall]) -> str:
    """Write the assistant's text and its calls as an action."""
    if not calls:
        return content
    # without the server's call ids, which differ from run to run
    entries = [{"function": {"name": c.name, "arguments": c.arguments}} for c in calls]
    said = {"content": content} if content else {}
    return json.dumps(said | {"tool_calls": entries}, ensure_ascii=False)


def read_message(text: str) -> tuple[str, list[FunctionCall] | None]:
    """Return text and calls of an action written by `write_message`; None for malformed calls."""
    try:
        message = STRICT_JSON.decode(text.strip())
    except (ValueError, RecursionError):
        return text, []
    if not isinstance(message, dict) or "tool_calls" not in message:
        return text, []
    entries, content = message["tool_calls"], message.get("content")
    calls = [_call(entry) for entry in entries] if isinstance(entries, list) else []
    known = [call for call in calls if call is not None]
    is_whole = known and len(known) == len(calls)
    return content if isinstance(content, str) else "", known if is_whole else None


class OpenAIFormat(ToolFormat):
    """Structured calls; a message without one is the answer, or goes to the user.

    With a user, an answer has tags.
    """

    name = "openai"
    is_native = is_structured = True

    def __init__(self, *, has_user: bool = False) -> None:
        self._has_user = has_user

    def parse(self, text: str, tools: Mapping[str, Tool]) -> ParsedAction:
        content, calls = read_message(text)
        if calls:
            read = [self.json_call(c.name, c.arguments, tools) for c in calls[: MAX_CALLS + 1]]
            return self.turn(read, tools)
        found = [span.content for _, span in find_spans(content, _MARKUP, _read_markup(content))]
        if calls is None or None in found:  # a call that the server could not parse
            return self.invalid("bad_call", BAD_CALL_TEXT, tools)
        tagged = [answer for answer in found if answer]
        if self._has_user:
            each = [self.checked_answer(answer, tools) for answer in tagged[: MAX_CALLS + 1]]
            return self.turn(each, tools)
        # many models answer in tags
        answer = tagged[0] if len(tagged) == 1 else without_thoughts(content)
        return self.checked_answer(answer, tools)

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = json.dumps(dict(arguments), ensure_ascii=False)
        return write_message("", [FunctionCall(name=name, arguments=written)])

    def write_answer(self, answer: str) -> str:
        return f"<answer>{answer}</answer>" if self._has_user else answer

    def instructions(self, tools: Sequence[Tool]) -> str:
        plain = ": a message that holds nothing but the answer."
        form = f", as {ANSWER_EXAMPLE}." if self._has_user else plain
        return f"Call a tool, or end with your final answer{form}"

    def examples(self, tools: Mapping[str, Tool]) -> str:
        """Describe calls and answers; no model writes the structure itself."""
        calls = CALL_FUNCTION_TEXT.format(names=", ".join(tools)) if tools else ""
        tagged = ANSWER_EXAMPLE_TEXT.format(answer=ANSWER_EXAMPLE)
        return calls + (tagged if self._has_user else ANSWER_IN_TEXT)

    def for_dialogue(self) -> ToolFormat:
        """Return the format in which an answer has tags; plain text goes to the user."""
        return OpenAIFormat(has_user=True)


def _read_markup(content: str) -> Callable[[re.Match[str]], Span]:
    """Return the reader of an answer between tags ("" if it is not closed), or None for a call."""
    last_end = content.rfind("</answer>")

    def read(opening: re.Match[str]) -> Span:
        start = opening.end()
        if opening["tag"] == "answer":
            if start > last_end:
                return Span(start, True, "")
            end = content.index("</answer>", start)
            is_whole = content.find(END_OF_THOUGHT, start, end) < 0
            return Span(end, is_whole, content[start:end])
        with contextlib.suppress(ValueError, RecursionError):
            return Span(STRICT_JSON.raw_decode(content, skip_space(content, start))[1], True, None)
        return Span(len(content), False, None)

    return read


def _call(entry: Any) -> FunctionCall | None:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return FunctionCall(name=function["name"], arguments=text)


def text_messages(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    control_tokens: Sequence[str] = (),
) -> list[ApiMessage]:
    """Return a state as plain text messages, with `control_tokens` and known ones broken up.

    The system prompt describes `tools`, unless the state does (None).
    """
    contents = _cleaned(messages, control_tokens)
    converted = fold_roles(
        [{"role": m["role"], "content": c} for m, c in zip(messages, contents, strict=True)],
        {"tool"},
    )
    if tools:
        shown = native_tools(tools, control_tokens)
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in shown)
        described = HERMES_TOOLS_TEXT.format(schemas=schemas)
        has_prompt = converted and converted[0]["role"] == "system"
        prompt = converted.pop(0)["content"] if has_prompt else ""
        converted.insert(0, {"role": "system", "content": (prompt + described).strip()})
    return converted


def fold_roles(
    messages: Iterable[Mapping[str, Any]], missing: Collection[str]
) -> list[dict[str, Any]]:
    """Return messages without roles that are `missing`: their texts become part of the user's."""
    folded: list[dict[str, Any]] = []
    before = None
    for message in messages:
        role, content = message["role"], message["content"]
        shown = "user" if role in missing else role
        if shown != role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if folded and shown == folded[-1]["role"] == "user":
            folded[-1]["content"] += ("\n" if role == before else "\n\n") + content
        else:
            folded.append({"role": shown, "content": content})
        before = role
    return folded


def native_messages(
    messages: Sequence[Message], control_tokens: Sequence[str] = ()
) -> list[ApiMessage]:
    """Return a state with the API's own calls and results; control tokens are broken up.

    The API requires a result for each call, so the replies to a turn with calls are their results:
    one each, or one error for all. A call that is not a JSON object stays text: many servers would
    fail on it.
    """
    converted: list[ApiMessage] = []
    pending: list[str] = []  # ids of calls without a result
    contents = _cleaned(messages, control_tokens)
    for place, (message, content) in enumerate(zip(messages, contents, strict=True)):
        if message["role"] == "assistant":
            converted += [_result(call_id, "") for call_id in pending]
            converted.append(_assistant(content, len(converted)))
            pending = [call["id"] for call in converted[-1].get("tool_calls", ())]
        elif pending:
            is_last = place + 1 == len(messages) or messages[place + 1]["role"] != "tool"
            answered = pending if is_last else pending[:1]
            converted += [_result(call_id, content) for call_id in answered]
            pending = pending[len(answered) :]
        else:  # a result of a call that stayed text, or that the context dropped
            role = "user" if message["role"] == "tool" else message["role"]
            converted.append({"role": role, "content": content})
    return converted + [_result(call_id, "") for call_id in pending]


def native_tools(
    tools: Sequence[Mapping[str, Any]], control_tokens: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return schemas for the API, with `control_tokens` and known ones broken up."""
    return [_broken(tool, control_tokens) for tool in tools]


def _broken(value: Any, more: Sequence[str]) -> Any:
    """Break up the control strings of every text in a schema; function names hold letters only."""
    if isinstance(value, str):
        return break_control_strings(_sendable(value), by="tool", more=more)
    if isinstance(value, Mapping):
        return {_broken(key, more): _broken(item, more) for key, item in value.items()}
    return [_broken(item, more) for item in value] if isinstance(value, list | tuple) else value


def action_text(content: str, calls: Sequence[FunctionCall], tool_format: ToolFormat) -> str:
    """Return a reply of the API as an action in `tool_format`.

    Calls that a server has parsed out of the text are written back as text.
    """
    if tool_format.is_structured:
        return write_message(content, calls)
    return "\n".join([*filter(None, [content]), *(_text(call, tool_format) for call in calls)])


def _assistant(content: str, place: int) -> ApiMessage:
    said, calls = read_message(content)
    if not calls or not all(_is_object(call.arguments) for call in calls):
        return {"role": "assistant", "content": content}
    functions = [{"name": call.name, "arguments": call.arguments or "{}"} for call in calls]
    entries = [
        {"id": f"call_{place}_{i}", "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "content": said or None, "tool_calls": entries}


def _result(call_id: str, content: str) -> ApiMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _text(call: FunctionCall, tool_format: ToolFormat) -> str:
    if _is_object(call.arguments):
        return tool_format.write_call(call.name, json.loads(call.arguments or "{}"))
    # malformed as the model wrote it; the environment reports the mistake
    return (
        f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'
    )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _cleaned(messages: Sequence[Message], more: Sequence[str]) -> list[str]:
    """Return the contents of messages without control strings."""
    contents, is_reply = [], False
    for message in messages:
        role, text = message["role"], message["content"]
        is_reply |= role == "assistant"
        by: Author | None = "tool" if role == "tool" else None
        if role == "user" and is_reply:
            by = "user"
        contents.append(break_control_strings(_sendable(text), by=by, more=more))
    return contents


def _sendable(text: str) -> str:
    """Return a text without lone surrogates, which a tool may return."""
    return text.encode("utf-8", "replace").decode("utf-8")
