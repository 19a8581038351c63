"""Simulated users: the script, and a model behind an endpoint."""

import pytest

from agent_envs.envs.dialogue.users import STOP, UserModel, make_user, script_user
from agent_envs.errors import ConfigurationError, ServerError, UnknownNameError
from tests.agent_trainers.chat_server import json_server, refuses, says

INSTRUCTIONS = {
    "domain": "retail",
    "reason_for_call": "You received your order #W1 and wish to exchange the lamp. If the agent "
    "asks for confirmation, only exchange it if it costs less than $20.",
    "known_info": "You are Mei Kovacs.\nYour zip code is 28236.",
    "unknown_info": "You do not remember your email address.",
    "task_instructions": "You don't want to share that the right item is 4107812777. You want to "
    "pay with the gift card that the shop gave you.",
}
GREETING = {"role": "assistant", "content": "Hi! How can I help you today?"}


def talk_of(*messages):
    """Return what the script replies to each message of the agent."""
    conversation, replies = [GREETING], []
    for message in (None, *messages):
        if message is not None:
            conversation.append({"role": "assistant", "content": message})
        replies.append(script_user(INSTRUCTIONS, conversation))
        conversation.append({"role": "user", "content": replies[-1]})
    return replies


def test_the_script_says_what_it_is_asked_for_in_the_first_person():
    opening, identity, payment, yes = talk_of(
        "What is your zip code or email?", "How would you like to pay?", "Do you confirm (yes)?"
    )
    assert opening == "Hello. I received my order #W1 and wish to exchange the lamp."
    assert identity == (
        "I am Mei Kovacs. My zip code is 28236. I do not remember my email address."
    )
    assert payment == "I want to pay with the gift card that the shop gave me."
    assert yes.startswith("If the agent asks for confirmation")
    assert talk_of("Your name, or your email?")[1] == identity


def test_the_script_says_each_fact_once_no_secret_and_then_agrees():
    replies = talk_of(*["Hm."] * 6, "Shall I proceed?", "You are transferred to a human.")
    assert len(set(replies[:5])) == 5
    assert replies[5:] == [
        "I have nothing to add.", "I have nothing to add.", "Yes, please go ahead.",
        "###TRANSFER###",
    ]  # fmt: skip
    assert not any("4107812777" in reply for reply in replies)
    assert STOP.search(replies[-1])


def test_a_model_reads_the_instructions_and_the_conversation_from_its_side(monkeypatch):
    monkeypatch.setenv("USER_KEY", "secret")
    seen = []

    def answer(path, body, headers):
        seen.append((path, body, headers["Authorization"]))
        return says(" It is #W1. ")

    with json_server(answer) as url:
        user = make_user(
            {"base_url": f"{url}/v1", "model": "m", "api_key_env": "USER_KEY", "temperature": 0.5}
        )
        assert user(INSTRUCTIONS, [GREETING, {"role": "user", "content": "Hello."}]) == "It is #W1."
    ((path, body, key),) = seen
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert (body["model"], body["temperature"]) == ("m", 0.5)
    system, *others = body["messages"]
    assert "known_info: You are Mei Kovacs." in system["content"]
    assert others == [
        {"role": "user", "content": GREETING["content"]}, {"role": "assistant", "content": "Hello."}
    ]  # fmt: skip


@pytest.mark.parametrize("reply", [refuses(400, "no key secret"), says(None)])
def test_a_model_without_a_reply_is_an_error_without_its_key(monkeypatch, reply):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with json_server(lambda *_: reply) as url, pytest.raises(ServerError) as raised:
        UserModel(base_url=url, model="m")(INSTRUCTIONS, [GREETING])
    assert url in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_user_is_a_function_an_import_path_or_a_name():
    assert make_user("script") is script_user
    assert make_user(f"{__name__}:talk_of") is talk_of
    assert make_user(talk_of) is talk_of
    with pytest.raises(UnknownNameError, match="Did you mean 'script'"):
        make_user("scripted")
    for wrong in (3, {"model": "m"}):
        with pytest.raises(ConfigurationError, match=r"user=.*base_url and model"):
            make_user(wrong)
