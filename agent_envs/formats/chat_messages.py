"""Conversion of states to messages of an OpenAI-compatible API, and of its replies to actions.

With structured calls (tool format ``openai``) the calls are the API's own; with every other format
they are text. Messages of environments have no call ids: calls are numbered by their place, so that
equal states are equal requests. A server renders the chat template itself, so control tokens in
texts are broken up (`break_control_strings`).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from agent_envs.core.messages import Message
from agent_envs.formats.openai_format import FunctionCall, read_message, write_message
from agent_envs.formats.tool_formats import ToolFormat

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

_WORDS: Final = "|".join([
    r"<\|[^<>|\s]{1,80}\|?>", r"<[^<>|\s]{1,80}\|>",  # ChatML, Llama 3 and 4, Phi, GPT-OSS, Gemma 4
    "<\uff5c[^<>\uff5c]{1,80}\uff5c>",  # DeepSeek
    r"</?s>", r"<</?SYS>>",  # Llama 2
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK"
    r"|CALL_ID|ARGS)\]",  # Mistral
    r"<(?:start|end)_of_turn>", r"</?(?:bos|eos|pad|unk)>", r"\[gMASK\]", "<sop>",  # Gemma, GLM
    r"</?tool_(?:response|result)>",  # Qwen, around tool results
])  # fmt: skip
_CALLS: Final = r"</?(?:tool_call|tools|think|arg_key|arg_value)>"
"""Tags that models write, and feedback of an environment shows, but no tool result."""


def text_messages(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    control_tokens: Sequence[str] = (),
) -> list[ApiMessage]:
    """Return a state as plain text messages, with `control_tokens` and known ones broken up.

    The system prompt describes `tools`, unless the state does (None).
    """
    converted: list[ApiMessage] = []
    before = None
    for message in messages:
        role, content = message["role"], _clean(message["content"], message["role"], control_tokens)
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if role == before == "tool":  # several calls of one turn make one user message
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
    """Return a state with the API's own calls and results; control tokens are broken up.

    The API requires a result for each call, so the replies to a turn with calls are their results:
    one each, or one error for all. A call that is not a JSON object stays text: many servers would
    fail on it.
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
        else:  # a result of a call that stayed text, or that the context dropped
            role = "user" if message["role"] == "tool" else message["role"]
            converted.append({"role": role, "content": content})
    return converted + [_result(call_id, "") for call_id in pending]


def native_tools(
    tools: Sequence[Mapping[str, Any]], control_tokens: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return schemas for the API, with `control_tokens` and known ones broken up."""
    # Function names hold letters only; inside JSON strings another blank is harmless.
    schemas = _clean(json.dumps(list(tools), ensure_ascii=False), "tool", control_tokens)
    return list(json.loads(schemas))


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


def _clean(text: str, role: str, control_tokens: Sequence[str]) -> str:
    # lone surrogates, which a tool may return, cannot be sent
    sendable = text.encode("utf-8", "replace").decode("utf-8")
    return break_control_strings(sendable, by_tool=role == "tool", more=control_tokens)


def break_control_strings(text: str, *, by_tool: bool = False, more: Iterable[str] = ()) -> str:
    """Insert a blank after the first character of each control token in `text`.

    A chat server may read ``<|im_end|>`` in a passage as the end of a turn. The tokens are those of
    well-known model families, and `more`; in tool results also those around calls and thoughts.
    """
    known = sorted(map(re.escape, filter(str.strip, more)), key=len, reverse=True)
    pattern = "|".join([*known, _WORDS, *([_CALLS] if by_tool else [])])
    return re.sub(pattern, lambda found: f"{found[0][0]} {found[0][1:]}", text)
