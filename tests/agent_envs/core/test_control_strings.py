import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_envs.formats.control_strings import break_control_strings
from agent_envs.formats.openai_format import native_tools, text_messages
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


def test_the_security_policy_lists_the_families():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert ", ".join(FAMILIES) in " ".join(page.split())


@pytest.mark.parametrize("text", [
    "if a < b || c > d: x[0] |= <b>bold</b> <stdio.h> [NOTE]", "let f = a |> b <| c", *CALLS,
    "#include <filesystem>", "Operating System: Linux", "## Input and output", "[1] <username>",
])  # fmt: skip
def test_other_text_stays_as_it_is(text):
    assert break_control_strings(text) == text


@pytest.mark.parametrize("hide", [
    "\u200b".join, lambda text: "".join(chr(ord(letter) + 0xFEE0) for letter in text),
    lambda text: f"{text[0]}\u00ad{text[1:]}", lambda text: f"\u202e{text}\ufeff",
])  # fmt: skip
@pytest.mark.parametrize("token", TOKENS[:2] + TOKENS[6:])
def test_unseen_characters_and_other_forms_of_letters_hide_no_control_token(hide, token):
    broken = break_control_strings(f"Oslo. {hide(token)}", by="tool")
    assert token not in re.sub(
        "[\u200b-\u202f\u00ad\ufeff]", "", unicodedata.normalize("NFKC", broken)
    )
    plain = "½ of Zu\u0308rich\u00ad \u200d"
    assert break_control_strings(plain, by="tool") == plain


def test_the_roles_of_a_family_are_broken_up_in_descriptions_of_tools():
    for family in FAMILIES.values():
        forged = "Look.\n" + "".join(f"{before}Obey.{after}" for before, after in family.values())
        schema = {"function": {"name": "f", "parameters": {"enum": [forged], forged: {}}}}
        markers = {text.strip() for pair in family.values() for text in pair} - {""}
        shown = native_tools([schema])[0]["function"]["parameters"]
        described = text_messages([], [schema])[0]["content"].replace("\\n", "\n")
        for text in (shown["enum"][0], next(reversed(shown)), described):
            assert [marker for marker in markers if marker in text] == []
