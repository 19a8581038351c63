"""From a state to the messages of an OpenAI-compatible API, and from its reply to an action.

With structured calls (tool format ``openai``) they are the API's own; with every other format they
are text, and the API sees nothing but a conversation. An environment's messages know no call ids:
calls are numbered by their place, so that the same state is the same request. A server renders and
encodes by itself, so control tokens in what is said are broken up (`break_control_strings`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.formats.control_strings import break_control_strings
from agent_envs.formats.openai_format import FunctionCall, read_message, write_message
from agent_envs.formats.tool_formats import ToolFormat

# As the chat templates of Qwen2.5 and Qwen3 say it, for servers that are not told of the tools.
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


def text_messages(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    control_tokens: Sequence[str] = (),
) -> list[ApiMessage]:
    """Return a state as a conversation in plain text, without `control_tokens` and known ones.

    The system prompt describes `tools`, for formats whose chat template would do so; they are None
    where the state describes them.
    """
    converted: list[ApiMessage] = []
    before = None
    for message in messages:
        role, content = message["role"], _clean(message["content"], message["role"], control_tokens)
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role == before == "tool":  # several calls of one turn: what the user says is one message
            converted[-1]["content"] += f"\n{content}"
        else:
            converted.append({"role": "user" if role == "tool" else role, "content": content})
        before = role
    if tools:
        schemas = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in tools)
        described = HERMES_TOOLS_TEXT.format(schemas=_clean(schemas, "tool", control_tokens))
        has_prompt = converted and converted[0]["role"] == "system"
        prompt = converted.pop(0)["content"] if has_prompt else ""
        converted.insert(0, {"role": "system", "content": (prompt + described).strip()})
    return converted


def native_messages(
    messages: Sequence[Message], control_tokens: Sequence[str] = ()
) -> list[ApiMessage]:
    """Return a state with the API's own calls and results, without `control_tokens` and known ones.

    The API asks for a result to each call, so what the environment says after a turn with calls is
    theirs: one for each, or else the one thing that was wrong for all of them. A call that is no
    JSON object goes back as the text it is: many servers would fail on it.
    """
    converted: list[ApiMessage] = []
    pending: list[str] = []  # ids of calls without a result
    for place, message in enumerate(messages):
        content = _clean(message["content"], message["role"], control_tokens)
        if message["role"] == "assistant":
            converted += [_result(call_id, "") for call_id in pending]
            converted.append(_assistant(content, len(converted)))
            pending = [call["id"] for call in converted[-1].get("tool_calls", ())]
        elif pending:
            is_last = place + 1 == len(messages) or messages[place + 1]["role"] != "tool"
            answered = pending if is_last else pending[:1]
            converted += [_result(call_id, content) for call_id in answered]
            pending = pending[len(answered) :]
        else:  # a result to a call that went back as text, or that the context dropped
            role = "user" if message["role"] == "tool" else message["role"]
            converted.append({"role": role, "content": content})
    return converted + [_result(call_id, "") for call_id in pending]


def native_tools(
    tools: Sequence[Mapping[str, Any]], control_tokens: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return schemas for the API, without `control_tokens` and known ones."""
    # Names of functions hold letters only; in JSON text a blank more in a string does no harm.
    schemas = _clean(json.dumps(list(tools), ensure_ascii=False), "tool", control_tokens)
    described: list[dict[str, Any]] = json.loads(schemas)
    return described


def action_text(content: str, calls: Sequence[FunctionCall], tool_format: ToolFormat) -> str:
    """Return a reply of the API as an action in `tool_format`.

    Some servers read calls out of the text by themselves; such calls are written back.
    """
    if tool_format.is_structured:
        return write_message(content, calls)
    return "\n".join([*([content] if content else []), *(_text(c, tool_format) for c in calls)])


def _assistant(content: str, place: int) -> ApiMessage:
    said, calls = read_message(content)
    if not calls or not all(_is_object(call.arguments) for call in calls):
        return {"role": "assistant", "content": content}
    entries = [
        {
            "id": f"call_{place}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments or "{}"},
        }
        for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": said or None, "tool_calls": entries}


def _result(call_id: str, content: str) -> ApiMessage:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _text(call: FunctionCall, tool_format: ToolFormat) -> str:
    if _is_object(call.arguments):
        return tool_format.write_call(call.name, json.loads(call.arguments or "{}"))
    # Malformed, as the model wrote it: the environment says what is wrong with it.
    return (
        f'<tool_call>{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}</tool_call>'
    )


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _clean(text: str, role: str, control_tokens: Sequence[str]) -> str:
    # Lone surrogates cannot be sent; a tool may return them all the same.
    sendable = text.encode("utf-8", "replace").decode("utf-8")
    return break_control_strings(sendable, by_tool=role == "tool", more=control_tokens)
