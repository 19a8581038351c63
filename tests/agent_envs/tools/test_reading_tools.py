"""read, find_in_page, note, drop_note and plan, in an episode."""

import pytest

from agent_envs.retrieval import Page
from agent_envs.tools.pages import PageReader
from tests.agent_envs.envs.playing import make

ID = "AgentR1/2WikiMultihopQA-v0"


@pytest.fixture
def env(data_files, request):
    kwargs = getattr(request, "param", {})
    tools = ["read", "find_in_page", "note", "plan"]
    return make(ID, data=data_files[ID], tools=tools, max_episode_steps=20, **kwargs)


def call(env, name, **arguments):
    observation, *_, info = env.step(env.unwrapped.write_call(name, **arguments))
    return observation, info


def test_a_page_is_read_with_its_sentences_numbered(env):
    text, _ = call(env, "read", title="iron  RIVER")
    assert text == "Iron River\n[0] Iron River is a film.\n[1] Leo Falk directed it."
    text, info = call(env, "read", title="Iron Harbor")
    assert info["action"]["error"] == "tool_error"
    assert text == "There is no page 'Iron Harbor'. Titles like it: Iron River; Iron Bridge."


def test_of_titles_that_differ_in_case_each_is_read():
    reader = PageReader()
    reader.take({title: [Page(title, (f"{title}!",))] for title in ("Help", "HELP")})
    assert [reader.read(title).split("\n")[0] for title in ("Help", "HELP")] == ["Help", "HELP"]


def test_a_text_is_found_in_the_page_read_last(env):
    _, info = call(env, "find_in_page", text="film")
    assert "Call read(title) first" in info["tool_result"]
    call(env, "read", title="Iron River")
    assert call(env, "find_in_page", text="LEO falk")[0] == "[1] Leo Falk directed it."
    assert call(env, "find_in_page", text="opera")[0] == "Iron River does not hold 'opera'."
    env.reset(options={"task": 0})
    assert "No page is open" in call(env, "find_in_page", text="film")[0]


@pytest.mark.parametrize(
    "env", [{"context": "full"}, {"context": {"name": "window", "turns": 1}}], indirect=True
)
def test_notes_and_plan_are_part_of_every_state(env):
    assert call(env, "drop_note", number=7)[0] == "There is no note 7 (there are: none)."
    assert call(env, "note", text=" ")[0] == "A note needs a text."
    call(env, "plan", text="First the director.")
    call(env, "note", text="Leo Falk directed it", title="Iron River", sentence=1)
    call(env, "note", text="not needed")
    text, _ = call(env, "drop_note", number=2)
    assert text == "Dropped note 2."
    _, info = call(env, "note", text="Leo Falk | born in | Oslo")
    question = next(message for message in info["messages"] if message["role"] == "user")
    assert question["content"].endswith(
        "\n\nPlan:\nFirst the director.\n\n"
        "Notes:\n[1] Leo Falk directed it (Iron River, 1)\n[3] Leo Falk | born in | Oslo"
    )
    _, info = env.reset(options={"task": 0})
    assert "Notes" not in info["messages"][-1]["content"]
