import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.formats.openai_format import break_control_strings

TOKENS = [
    "<|im_start|>", "<|start_header_id|>", "<|turn>", "<turn|>", "<\uff5cUser\uff5c>", "<s>",
    "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<<SYS>>", "<end_of_turn>", "<tool_response>",
]  # fmt: skip
CALLS = ["<tool_call>", "</think>"]


@given(st.lists(st.sampled_from([*TOKENS, *CALLS, "<", "|", ">", "[", "x"])).map("".join))
def test_nothing_is_left_that_is_a_control_token(text):
    broken = break_control_strings(text, by_tool=True)
    assert [token for token in TOKENS + CALLS if token in broken] == []
    assert break_control_strings(broken, by_tool=True) == broken
    assert broken.replace(" ", "") == text


@pytest.mark.parametrize("text", [
    "if a < b || c > d: x[0] |= <b>bold</b> <stdio.h> [NOTE]", "let f = a |> b <| c", *CALLS,
])  # fmt: skip
def test_other_text_stays_as_it_is(text):
    assert break_control_strings(text) == text
