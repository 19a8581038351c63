import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.core.openai_format import FunctionCall, write_message
from agent_envs.core.tool import tool
from agent_envs.core.tool_formats import TOOL_FORMATS


@tool
def search(query: str) -> str:
    """Search for something.

    Args:
        query: What to look for.
    """
    return query


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = {"search": search, "add": add}
HERMES, TAGS, JSON, REACT, OPENAI = (
    TOOL_FORMATS[name] for name in ("hermes", "tags", "json", "react", "openai")
)
RED = '{"query": "red"}'
EXAMPLES = (
    'To call a tool, write <tool_call>{"name": "search", "arguments": {"query": "the query"}}'
    "</tool_call>. To answer, write <answer>your answer</answer>."
)


def parse(text, form=HERMES, tools=None):
    return form.parse(text, tools or TOOLS).as_info()


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>{"name": "search", "arguments": {"query": "red"}}</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "search", "arguments": {"query": "red"}}\n</tool_call>'),
        (HERMES, 'So: <tool_call>{"name": "search", "arguments": {"query": "red"}}</tool_call> ok'),
        (HERMES, '<tool_call>{"name": "search", "arguments": {"query": "red"}}'),
        (HERMES, '<think><answer>no</answer></think><tool_call>{"name": "search", '
                 '"arguments": {"query": "red"}}</tool_call>'),
        (TAGS, "<search>red</search>"),
        (TAGS, "I search. <search> red </search>"),
        (JSON, '{"name": "search", "arguments": {"query": "red"}}'),
        (JSON, 'It is \\frac{1}{2}.\n```\n{"name": "search", "arguments": {"query": "red"}}\n```'),
        (REACT, f"Thought: look\nAction: search\nAction Input: {RED}"),
        (REACT, "Action: search\nAction Input: red"),
        (REACT, f"Action: search\nAction Input: {RED}\nObservation: none\nFinal Answer: no"),
        (OPENAI, write_message("", [FunctionCall(name="search", arguments=RED)])),
        (OPENAI, write_message("So:", [FunctionCall(name="search", arguments=RED)])),
        (OPENAI, '{"tool_calls": [{"function": {"name": "search", "arguments": ' + RED + "}}]}"),
    ],
)  # fmt: skip
def test_a_call_is_understood(form, text):
    assert parse(text, form) == {
        "kind": "tool_call",
        "name": "search",
        "arguments": {"query": "red"},
    }


def test_tags_take_an_object_where_a_tool_has_several_arguments():
    assert parse('<add>{"a": 1, "b": 2}</add>', TAGS)["arguments"] == {"a": 1, "b": 2}


@pytest.mark.parametrize("form", [HERMES, TAGS])
def test_an_answer_is_understood(form):
    assert parse("I know: <answer> Paris </answer>", form) == {"kind": "answer", "answer": "Paris"}


def test_an_answer_inside_a_query_belongs_to_the_query():
    query = "a page that contains <answer>Paris</answer> and </tool_call>"
    text = HERMES.write_call("search", {"query": query})
    assert parse(text) == {"kind": "tool_call", "name": "search", "arguments": {"query": query}}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Paris", "no_action"),
        ("<think><answer>Paris</answer>", "no_action"),
        ("<answer>a</answer><answer>b</answer>", "multiple_actions"),
        ("<tool_call>{}</tool_call>", "bad_call"),
        ("<tool_call>[]</tool_call>", "bad_call"),
        ('<tool_call>{"name": "search", "arguments": "red"}</tool_call>', "bad_call"),
        ("<tool_call>search</tool_call>", "bad_json"),
        ('<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', "bad_json"),
        ('<tool_call>{"name": "search", "arguments": {}} or so</tool_call>', "bad_json"),
        ("<tool_call>" + "[" * 100_000, "bad_json"),
        ('<tool_call>{"name": "seek", "arguments": {}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', "bad_arguments"),
        ("<answer>Paris", "bad_answer"),
        ("<answer> </answer>", "bad_answer"),
    ],
)
def test_a_mistake_has_a_code(text, code):
    action = parse(text)
    assert action["kind"] == "invalid"
    assert action["error"] == code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Paris", f"Your turn held neither a tool call nor an answer. {EXAMPLES}"),
        (
            '<tool_call>{"name": "seek", "arguments": {}}</tool_call>',
            f"There is no tool 'seek'. {EXAMPLES}",
        ),
        (
            '<tool_call>{"name": "search", "arguments": {}}</tool_call>',
            f"Wrong arguments for 'search': 'query' is missing. {EXAMPLES}",
        ),
    ],
)
def test_the_model_reads_what_was_wrong_and_how_to_write_it_right(text, message):
    assert parse(text, tools={"search": search})["message"] == message


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (JSON, 'I know: {"answer": " Paris "}'),
        (REACT, "Thought: I know\nFinal Answer: Paris"),
        (OPENAI, "<think>hm</think> Paris"),
        (OPENAI, "It is <answer>Paris</answer>."),
    ],
)
def test_each_format_has_its_own_way_to_answer(form, text):
    assert parse(text, form) == {"kind": "answer", "answer": "Paris"}


def test_a_number_is_an_answer_in_json():
    assert parse('{"answer": 42}', JSON)["answer"] == "42"


@pytest.mark.parametrize(
    ("form", "text", "code"),
    [
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
        (OPENAI, write_message("", [FunctionCall(name="search", arguments=RED)] * 2),
         "multiple_actions"),
    ],
)  # fmt: skip
def test_each_format_names_a_mistake_by_the_same_codes(form, text, code):
    action = parse(text, form)
    assert (action["kind"], action["error"]) == ("invalid", code)


def test_feedback_shows_each_format_as_it_is_written():
    one = {"search": search}
    assert parse("hm", JSON, one)["message"].endswith(
        'To call a tool, write {"name": "search", "arguments": {"query": "the query"}}. '
        'To answer, write {"answer": "your answer"}.'
    )
    assert parse("hm", REACT, one)["message"].endswith(
        "To answer, write Final Answer: your answer."
    )
    assert parse("", OPENAI, one)["message"] == (
        "The answer is empty. To call a tool, call one of the functions search. To answer, write "
        "nothing but the answer, without a call."
    )


@pytest.mark.parametrize("form", [JSON, REACT])
def test_the_instructions_show_a_call_that_the_format_reads_and_describe_the_tool(form):
    text = form.instructions([search])
    assert "Search for something." in text
    assert "What to look for." in text


@given(query=st.text(), form=st.sampled_from([JSON, REACT, OPENAI]))
def test_a_call_is_read_back_as_it_was_written(query, form):
    action = form.parse(form.write_call("search", {"query": query}), TOOLS)
    if "</think>" not in query and "<think>" not in query:
        assert action.arguments == {"query": query}


@given(st.text(), st.sampled_from(list(TOOL_FORMATS.values())))
def test_no_text_makes_a_parser_raise(text, form):
    assert form.parse(text, TOOLS).kind in ("tool_call", "answer", "invalid")


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<answer>", "</answer>", "<search>", "</search>", "<think>",
     "</think>",
     "\nAction: ", "\nAction Input:", "Final Answer:", '{"tool_calls": [',
     '{"name": "search"', ', "arguments": {"query": "x"}}', "{", "}", "x", " "]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(list(TOOL_FORMATS.values())))
def test_no_jumble_of_markup_makes_a_parser_raise(text, form):
    assert form.parse(text, TOOLS).kind in ("tool_call", "answer", "invalid")


@given(st.text())
def test_a_hermes_call_is_read_back_as_it_was_written(query):
    action = HERMES.parse(HERMES.write_call("search", {"query": query}), TOOLS)
    if "</think>" not in query and "<think>" not in query:
        assert action.arguments == {"query": query}
