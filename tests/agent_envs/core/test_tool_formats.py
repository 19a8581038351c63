import json
import time
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agent_envs.core.tool import tool
from agent_envs.formats.actions import (
    MAX_CALLS,
    MAX_EXAMPLE_CHARS,
    MAX_REASON_CHARS,
    example_arguments,
)
from agent_envs.formats.openai_format import FunctionCall, write_message
from agent_envs.formats.tool_formats import TOOL_FORMATS


@tool
def search(query: str) -> str:
    """Search for something."""
    return query


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def note(title: str, text: str) -> str:
    """Note something."""
    return title + text


TOOLS = {"search": search, "add": add, "note": note}
HERMES, TAGS, JSON, REACT, OPENAI = (
    TOOL_FORMATS[name] for name in ("hermes", "tags", "json", "react", "openai")
)
RED = '{"query": "red"}'


def parse(text, form=HERMES, tools=None):
    return form.parse(text, tools or TOOLS).as_info()


CALL = {"kind": "tool_call", "name": "search", "arguments": {"query": "red"}}
ADDITION = CALL | {"name": "add", "arguments": {"a": 1, "b": 2}}
MADE = '{"name": "search", "arguments": {"query": "red"}}'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, f"<tool_call>{MADE}</tool_call>", CALL),
        (HERMES, f"So: <tool_call>{MADE}</tool_call> ok", CALL),
        (HERMES, f"<tool_call>{MADE}", CALL),
        (HERMES, f"<think><answer>no</answer></think><tool_call>{MADE}</tool_call>", CALL),
        (TAGS, "I search. <search> red </search>", CALL),
        (JSON, MADE, CALL),
        (JSON, f"It is \\frac{{1}}{{2}}.\n```\n{MADE}\n```", CALL),
        (REACT, f"Thought: look\nAction: search\nAction Input: {RED}", CALL),
        (REACT, "Action: search\nAction Input: red", CALL),
        (REACT, f"Action: search\nAction Input: {RED}\nObservation: none\nFinal Answer: no", CALL),
        (OPENAI, write_message("So:", [FunctionCall(name="search", arguments=RED)]), CALL),
        (OPENAI, '{"tool_calls": [{"function": ' + MADE + "}]}", CALL),
        (TAGS, '<add>{"a": 1, "b": 2}</add>', ADDITION),
        (JSON, '{"answer": 42}', {"kind": "answer", "answer": "42"}),
        *((OPENAI, text, {"kind": "answer", "answer": "Paris"}) for text in (
            "Paris <think>sure?</think>", "<think>a</think>Paris<think>b</think>",
            "It was open.</think>Paris",
        )),
    ],
)  # fmt: skip
def test_calls_and_answers_are_parsed(form, text, expected):
    assert parse(text, form) == expected


def written(calls, form):
    """A turn with several calls, as a model would write it."""
    if form is not OPENAI:
        return "I need both.\n" + "\n".join(form.write_call(*call) for call in calls)
    return write_message(
        "I need both.",
        [FunctionCall(name=name, arguments=json.dumps(arguments)) for name, arguments in calls],
    )


@pytest.mark.parametrize("form", list(TOOL_FORMATS.values()), ids=list(TOOL_FORMATS))
def test_several_calls_of_a_turn_are_parsed_in_order_including_mistakes(form):
    calls = [("seek", {}), ("search", {"query": "red"}), ("add", {"a": 1, "b": 2})]
    if form is TAGS:  # there is no tag for a tool that does not exist
        calls[0] = ("add", {})
    action = form.parse(written(calls, form), TOOLS)
    assert [call.name for call in action.calls] == [None, "search", "add"]
    assert action.calls[0].error in ("unknown_tool", "bad_arguments")
    info = action.as_info()
    assert CALL.items() <= info.items()
    assert info["calls"][2] == ADDITION
    assert not action.is_faultless
    most = form.parse(written([calls[1]] * MAX_CALLS, form), TOOLS)
    assert len(most.calls) == MAX_CALLS
    assert most.is_faultless


@pytest.mark.parametrize(
    ("form", "text", "code"),
    [
        (OPENAI, "<answer>It is <tool_call>.</answer>", None),
        (OPENAI, "Is it <answer>?", None),
        (OPENAI, "<answer>a</answer><answer>b</answer>", None),
        (OPENAI, '<tool_call>{"name": "search", <answer>yes</answer>', "bad_call"),
        (HERMES, "Paris", "no_action"),
        (HERMES, "<think><answer>Paris</answer>", "no_action"),
        (HERMES, "<answer>a</answer><answer>b</answer>", "multiple_actions"),
        (HERMES, "<tool_call>{}</tool_call>", "bad_call"),
        (HERMES, "<tool_call>[]</tool_call>", "bad_call"),
        (HERMES, '<tool_call>{"name": "search", "arguments": "red"}</tool_call>', "bad_call"),
        (HERMES, "<tool_call>search</tool_call>", "bad_json"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"query": NaN}}</tool_call>', "bad_json"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": -1e999}}</tool_call>', "bad_json"),
        (HERMES, '<tool_call>{"name": "search", "arguments": {}} or so</tool_call>', "bad_json"),
        (HERMES, "<tool_call>" + "[" * 100_000, "bad_json"),
        (HERMES, '<tool_call>{"name": "seek", "arguments": {}}</tool_call>', "unknown_tool"),
        (HERMES, '<tool_call>{"name": "search", "arguments": {}}</tool_call>', "bad_arguments"),
        (HERMES, "<answer>Paris", "bad_answer"),
        (HERMES, "<answer> </answer>", "bad_answer"),
        (JSON, "Paris", "no_action"),
        (JSON, '{"answer": "a"} {"answer": "b"}', "multiple_actions"),
        (JSON, '{"name": "search"', "bad_json"),
        (JSON, '{"query": "red"}', "bad_call"),
        (JSON, '{"name": "seek", "arguments": {}}', "unknown_tool"),
        (JSON, '{"answer": null}', "bad_answer"),
        (REACT, "Paris", "no_action"),
        (REACT, "Action: search\nAction Input: red\nFinal Answer: Paris", "multiple_actions"),
        (REACT, "Action: add\nAction Input: one", "bad_json"),
        (REACT, "Action: search\nAction Input: {} then", "bad_call"),
        (REACT, "Action: search", "bad_arguments"),
        (REACT, "Action: seek\nAction Input: red", "unknown_tool"),
        (REACT, "Final Answer:", "bad_answer"),
        (OPENAI, "", "bad_answer"),
        (OPENAI, '<tool_call>{"name": "search", </tool_call>', "bad_call"),
        (OPENAI, '{"tool_calls": [{"function": "search"}]}', "bad_call"),
        (OPENAI, write_message("", [FunctionCall(name="search", arguments="red")]), "bad_json"),
        (OPENAI, write_message("", [FunctionCall(name="search", arguments="[]")]), "bad_call"),
        (OPENAI, write_message("", [FunctionCall(name="seek", arguments="{}")]), "unknown_tool"),
        (OPENAI, write_message("", [FunctionCall(name="search", arguments=RED)] * 17),
         "multiple_actions"),
        (HERMES, HERMES.write_call("search", {"query": "x"}) * 17, "multiple_actions"),
        (TAGS, "<search>red</search><answer>Paris</answer>", "multiple_actions"),
        (JSON, '{"answer": "a"}' + MADE, "multiple_actions"),
        (REACT, "Action: add\nAction Input: {}\nAction Input: {}", "multiple_actions"),
    ],
)  # fmt: skip
def test_mistakes_have_the_same_codes_in_each_format(form, text, code):
    action = parse(text, form)
    assert (action["kind"], action.get("error")) == ("invalid" if code else "answer", code)


TOKENS = (
    "<tool_call>", "</tool_call>", "<answer>", "</answer>", "<answer>yes</answer>", "<search>",
    "</search>", "<add>{}</add>", "</note>", "<think>", "</think>", "\nAction: search",
    "\nAction Input:", "\nFinal Answer: yes\n", "\nObservation:", '{"answer": "yes"}',
    '{"tool_calls": [', '{"name": "search"', '{"name": "search", "arguments": {"query": "x"}}',
    ', "arguments": {"query": "x"}}', "{", "}", "{}", '{"a":', "[", '"', "\\", "x", " ", "\n",
)  # fmt: skip
JUMBLE = st.lists(st.sampled_from(TOKENS), max_size=12).map("".join)
FORMS = st.sampled_from(list(TOOL_FORMATS.values()))


@given(JUMBLE | st.text(), JUMBLE, FORMS)
def test_no_text_makes_a_parser_raise_and_markup_in_arguments_is_not_an_action(title, text, form):
    assert form.parse(title, TOOLS).kind in ("tool_call", "answer", "invalid")
    arguments = {"title": title, "text": text}
    before = "" if form is OPENAI else "So: \n"
    action = form.parse(before + form.write_call("note", arguments), TOOLS)
    assert (action.kind, action.name, action.arguments) == ("tool_call", "note", arguments)
    assert not action.calls


@given(JUMBLE)
def test_markup_in_one_argument_is_not_an_action(query):
    action = TAGS.parse(TAGS.write_call("search", {"query": query}), TOOLS)
    if "</search>" not in query:
        assert action.arguments == {"query": query.strip()}
    call = HERMES.write_call("search", {"query": query})  # which a server did not parse
    action = OPENAI.parse(f"Let me look. {call} <answer>yes</answer>", TOOLS)
    assert (action.kind, action.error) == ("invalid", "bad_call")


@given(JUMBLE, st.sampled_from([HERMES, TAGS, JSON, REACT]), st.booleans())
def test_markup_in_thoughts_and_code_is_not_an_action(text, form, is_thought):
    text = text.replace("</think>", "") if is_thought else text
    before = f"<think>{text}</think>\n" if is_thought else f"I could write\n```\n{text}\n```\n"
    for action in (form.write_call("note", {"title": "a", "text": "b"}), form.write_answer("no")):
        assert form.parse(before + action, TOOLS) == form.parse(action, TOOLS)
        # The chat template opened the thought.
        opened = f'I could say <answer> or <tool_call>, {{"answer": or so.\n{before[7:]}{action}'
        if is_thought and "<think>" not in text:
            assert form.parse(opened, TOOLS) == form.parse(action, TOOLS)


BEGINNINGS = ("", "<tool_call>", "{", "Action: add\nAction Input: {", "<answer>", '{"tool_calls":[')


@pytest.mark.parametrize("form", list(TOOL_FORMATS.values()), ids=list(TOOL_FORMATS))
def test_hostile_texts_of_100_kb_are_parsed_fast_with_short_feedback(form):
    for number, token in enumerate((*TOKENS, "`", "``` ", "`\n", "<think>x</think>")):
        text = BEGINNINGS[number % len(BEGINNINGS)] + token * (100_000 // len(token))
        started = time.thread_time()
        action = form.parse(text, TOOLS)
        assert time.thread_time() - started < 3, token  # 0.1 s; what is quadratic takes 5
        assert len(action.message or "") < 1_000
    wrong = {f"{i}{'x' * 500}": i for i in range(200)}
    message = parse(form.write_call("add", wrong), form)["message"]
    assert len(message) < MAX_REASON_CHARS + 500
    many = {f"tool_{i}": search for i in range(500)}
    assert len(form.parse("hm", many).message or "") < MAX_EXAMPLE_CHARS + 500


class Place(BaseModel):
    name: str
    floor: int


@tool
def echo(content: str, file_name: str | None = None, times: int = 1) -> str:
    """Write something."""
    return content


@tool
def go(
    place: Place, mode: Literal["foot", "car"], far: bool, stops: list[float], with_: str | None
) -> str:
    """Go somewhere."""
    return mode


@pytest.mark.parametrize("form", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
@pytest.mark.parametrize("made", [search, echo, go])
def test_the_example_of_a_call_can_be_parsed(made, form):
    shown = form.write_call(made.name, example_arguments(made))
    tools = {made.name: made}
    assert form.is_structured or shown in form.examples(tools)
    action = form.parse(shown, tools)
    assert (action.kind, action.name, action.message) == ("tool_call", made.name, None)


def test_plain_text_is_the_only_required_argument():
    tools = {"echo": echo}
    for text in ("<echo>hello</echo>", '<echo>{"content": "hello"}</echo>'):
        assert parse(text, TAGS, tools)["arguments"]["content"] == "hello"
    assert parse("<echo></echo>", TAGS, tools)["error"] == "bad_arguments"
    assert parse("Action: echo\nAction Input: hello", REACT, tools)["kind"] == "tool_call"
