import gymnasium as gym
import pytest

from agent_envs.core.transcript import Entry, format_entries
from agent_envs.play import main

ID = "AgentR1/SyntheticMultiHop-v0"


@pytest.fixture
def play(capsys):
    def run(*lines, arguments=("--task", "3")):
        typed = iter(lines)

        def ask(prompt):
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        main([ID, *arguments], ask)
        return capsys.readouterr().out

    return run


def test_a_person_solves_a_task_with_the_hints(play):
    shown = play("hint")
    searches = [line.split('"query": "')[1][:-14] for line in shown.splitlines() if "query" in line]
    answer = shown.split("<answer>")[1].split("</answer>")[0]
    shown = play(*(f"search {query.strip()}" for query in searches), f"answer {answer}")
    assert "success 1" in shown
    assert "return 1.2" in shown


def test_what_is_typed_becomes_what_a_model_would_write(play):
    shown = play("search query=film", "raw <tool_call>", "hm", "help", "quit")
    assert '<tool_call>{"name": "search", "arguments": {"query": "film"}}</tool_call>' in shown
    assert "bad_json" in shown
    assert "no_action" in shown
    assert "name=value" in shown


def test_bad_arguments_are_explained():
    for arguments, message in (
        (["AgentR1/Nothing-v0"], "Nothing"),
        ([ID, "--env_kwargs", '{"hops": 9}'], "hops"),
        ([ID, "--env_kwargs", "[]"], "JSON object"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments, lambda prompt: "quit")


def test_an_episode_is_rendered_in_colour_or_printed_as_it_goes_on(capsys):
    env = gym.make(ID, render_mode="ansi")
    env.reset(options={"task": 1})
    first, *_ = env.unwrapped.reference_actions()
    env.step(first)
    text = env.render()
    assert "\x1b[1;36mtask" in text
    assert "new_gold_passage +0.1" in text
    assert first[:60] in text
    assert capsys.readouterr().out == ""
    env = gym.make(ID, render_mode="human")
    env.reset(options={"task": 1})
    assert env.unwrapped.task.question in capsys.readouterr().out
    assert env.render() is None


def test_a_notebook_gets_the_text_too(monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    env = gym.make(ID, render_mode="ansi")
    env.reset(options={"task": 1})
    assert env.unwrapped.task.question in env.render()


def test_what_is_shown_cannot_steer_the_terminal():
    text = format_entries(
        [Entry(speaker="agent", text="a\x1b[2Jb [red]c\ud800")], is_coloured=False
    )
    assert "\x1b" not in text
    assert "a\\x1b[2Jb [red]c" in text
