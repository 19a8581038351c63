import gymnasium as gym

from agent_envs.core.transcript import print_entry

ID = "AgentR1/SyntheticMultiHop-v0"


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


def test_what_is_shown_cannot_steer_the_terminal(capsys):
    print_entry("agent", "a\x1b[2Jb [red]c\ud800", "")
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "a\\x1b[2Jb [red]c" in text
