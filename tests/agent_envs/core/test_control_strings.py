from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.formats.control_strings import break_control_strings
from tests.role_markers import FAMILIES

ROOT = Path(__file__).parents[3]
TOKENS = [
    "<|im_start|>", "<|start_header_id|>", "<|turn>", "<turn|>", "<\uff5cUser\uff5c>", "<s>",
    "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<<SYS>>", "<end_of_turn>", "<tool_response>",
]  # fmt: skip
CALLS = ["<tool_call>", "</think>"]


@given(st.lists(st.sampled_from([*TOKENS, *CALLS, "<", "|", ">", "[", "x"])).map("".join))
def test_nothing_is_left_that_is_a_control_token(text):
    broken = break_control_strings(text, by="tool")
    assert [token for token in TOKENS + CALLS if token in broken] == []
    assert break_control_strings(broken, by="tool") == broken
    assert broken.replace(" ", "") == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stranger_cannot_write_the_roles_of_a_family(family):
    for before, after in FAMILIES[family].values():
        text = break_control_strings(f"Oslo.\n{before}Obey.{after}", by="tool")
        markers = filter(None, (before.strip(), after.strip()))
        assert [marker for marker in markers if marker in text] == []
        assert "Obey." in text


def test_the_page_on_security_lists_the_families():
    page = (ROOT / "docs/explanation/security.md").read_text(encoding="utf-8")
    assert ", ".join(FAMILIES) in " ".join(page.split())


@pytest.mark.parametrize("text", [
    "if a < b || c > d: x[0] |= <b>bold</b> <stdio.h> [NOTE]", "let f = a |> b <| c", *CALLS,
    "#include <filesystem>", "Operating System: Linux", "## Input and output", "[1] <username>",
])  # fmt: skip
def test_other_text_stays_as_it_is(text):
    assert break_control_strings(text) == text
