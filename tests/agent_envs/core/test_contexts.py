import pytest

from agent_envs import ConfigurationError, UnknownNameError
from agent_envs.core.contexts import SHORTENED_TEXT, History, estimate_tokens, make_context


def history(num_turns, result="r" * 100):
    """Each message counts one token a character."""
    turns = tuple(
        ({"role": "assistant", "content": f"a{i}"}, {"role": "tool", "content": result})
        for i in range(num_turns)
    )
    initial = ({"role": "user", "content": "question"},)
    return History(initial, turns, lambda messages: sum(len(m["content"]) for m in messages))


def test_full_shows_everything():
    view = make_context("full")(history(3))
    assert len(view.messages) == 7
    assert view.reason is None


def test_window_shows_the_task_and_the_last_turns():
    view = make_context({"name": "window", "turns": 2})(history(5))
    assert [m["content"] for m in view.messages if m["role"] == "assistant"] == ["a3", "a4"]
    assert view.messages[0]["content"] == "question"
    assert view.num_dropped == 6
    assert view.reason == "window: the last 2 turns"


def test_window_says_nothing_while_everything_fits():
    assert make_context({"name": "window", "turns": 2})(history(2)).reason is None


def test_budget_shortens_the_oldest_results_first():
    # 8 + 3 * 102 = 314 tokens; a stub has 43, so shortening the first leaves 257
    view = make_context({"name": "budget", "tokens": 260})(history(3))
    contents = [m["content"] for m in view.messages if m["role"] == "tool"]
    assert contents == [SHORTENED_TEXT, "r" * 100, "r" * 100]
    assert (view.num_dropped, view.num_shortened) == (0, 1)


def test_budget_then_drops_the_oldest_turns():
    view = make_context({"name": "budget", "tokens": 115})(history(3))
    assert [m["content"][0] for m in view.messages] == ["q", "a", "r"]
    assert view.num_dropped == 4


def test_budget_shortens_the_last_result_if_nothing_else_helps():
    view = make_context({"name": "budget", "tokens": 60})(history(1))
    assert view.messages[-1]["content"] == SHORTENED_TEXT


@pytest.mark.parametrize("tokens", range(1, 400, 13))
def test_budget_holds_wherever_it_can(tokens):
    view = make_context({"name": "budget", "tokens": tokens})(history(4))
    smallest = len("question") + len("a3") + len(SHORTENED_TEXT)
    assert sum(len(m["content"]) for m in view.messages) <= max(tokens, smallest)


def test_tokens_are_estimated_by_bytes_and_messages():
    # 7 + 2 * 2 + 5 = 16 bytes, so 4 tokens, and 4 more for each message
    messages = [{"role": "user", "content": "abcdef éé"}, {"role": "tool", "content": "hijkl"}]
    assert estimate_tokens(messages) == 16 // 4 + 4 * 2


def test_an_unknown_context_gets_the_nearest_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'window'"):
        make_context("windw")


@pytest.mark.parametrize(
    "options", [{"name": "window", "turns": 0}, {"name": "window", "k": 2}, {}]
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigurationError):
        make_context(options)
