from dataclasses import replace

import gymnasium as gym
import pytest

from agent_envs import ConfigurationError, UnknownNameError, View
from agent_envs.core.contexts import (
    SHORTENED_TEXT,
    History,
    Summary,
    estimate_tokens,
    make_context,
    make_view,
)


def history(num_turns, result="r" * 100, summaries=None):
    """Each character counts one token."""
    turns = tuple(
        ({"role": "assistant", "content": f"a{i}"}, {"role": "tool", "content": result})
        for i in range(num_turns)
    )
    initial = ({"role": "user", "content": "question"},)
    count = lambda messages: sum(len(m["content"]) for m in messages)  # noqa: E731
    return History(initial, turns, count, summaries={} if summaries is None else summaries)


def test_budget_is_kept_if_possible():
    smallest = len("question") + len("a3") + len(SHORTENED_TEXT)
    for tokens in range(1, 400, 13):
        view = make_context({"name": "budget", "tokens": tokens})(history(4))
        assert sum(len(m["content"]) for m in view.messages) <= max(tokens, smallest)


@pytest.mark.parametrize("num_turns", [1, 2, 5, 64])
def test_budget_drops_as_few_turns_as_possible_and_counts_rarely(num_turns):
    past, counted = history(num_turns, result="r" * 10), []
    count = past.count_tokens
    observed = replace(past, count_tokens=lambda messages: counted.append(0) or count(messages))
    sizes = [count(past.with_turns(past.turns[k:])) for k in range(num_turns)]
    for tokens in (1, 20, 21, 40, 100, 400, 10_000):
        counted.clear()
        view = make_context({"name": "budget", "tokens": tokens})(observed)
        fewest = next((k for k, size in enumerate(sizes) if size <= tokens), num_turns - 1)
        assert view.messages == past.with_turns(past.turns[fewest:])
        assert len(counted) <= 8  # 1 + log2(64) + 1; a trainer tokenises the state each time


def test_tokens_are_estimated_by_bytes_and_messages():
    # 7 + 2 * 2 + 5 = 16 bytes, so 4 tokens, and 4 more for each message
    messages = [{"role": "user", "content": "abcdef éé"}, {"role": "tool", "content": "hijkl"}]
    assert estimate_tokens(messages) == 16 // 4 + 4 * 2


def summarise_first_words(messages):
    """A summariser that others can import; counts its calls."""
    summarise_first_words.calls.append(messages)
    return " ".join(message["content"][:2] for message in messages if message["role"] != "tool")


@pytest.fixture(autouse=True)
def no_calls():
    summarise_first_words.calls = []


def test_a_summary_replaces_the_past_and_is_written_once():
    context = make_context({"name": "summary", "summarise": f"{__name__}:summarise_first_words",
                            "turns": 2})  # fmt: skip
    written = {}
    for num_turns, num_past in ((0, 0), (2, 0), (3, 2), (4, 2), (5, 4)):
        view = context(history(num_turns, summaries=written))
        roles = [message["role"] for message in view.messages]
        assert roles == ["user", *["assistant", "tool"] * (num_turns - num_past)]
        assert view.num_dropped == 2 * num_past
        reason = f"summary: of the first {num_past} turns" if num_past else None
        assert view.reason == reason
        assert context(history(num_turns, summaries=written)) == view
    # The second is asked for with the first, below the question.
    first, second = summarise_first_words.calls
    assert [m["content"][:2] for m in first] == ["qu", "a0", "rr", "a1", "rr"]
    assert second[0]["content"] == "question\n\nWhat has happened so far, in short:\nqu a0 a1"
    assert view.messages[0]["content"].endswith("in short:\nqu a2 a3")
    assert view.messages[1]["content"] == "a4"


def test_pinned_text_is_shown_but_not_summarised():
    pinned = ({"role": "user", "content": "question\n\nnotes"},)
    one = history(2)
    view = Summary(summarise_first_words, turns=1)(History(pinned, one.turns, len, one.initial))
    assert summarise_first_words.calls[0][0]["content"] == "question"
    assert view.messages[0]["content"].startswith("question\n\nnotes\n\nWhat has happened")


def policy_env(**options):
    return gym.make("AgentR1/SyntheticMultiHop-v0", hops=4, context={"name": "policy", **options})


def run_until_request(env, seed=3):
    """Take the reference actions until a summary is requested; return the actions and results."""
    env.reset(seed=seed)
    actions, results = env.unwrapped.reference_actions(), []
    while not results or "is_summary_requested" not in results[-1][4].get("context", {}):
        results.append(env.step(actions[len(results)]))
    return actions[: len(results)], results


def test_the_policys_summary_replaces_the_turns_before_it():
    env = policy_env(budget_tokens=150, request="Summarise.")
    _, results = run_until_request(env)
    observation, *_, info = results[-1]
    assert [m["role"] for m in info["messages"]] == ["system", "user", *["assistant", "tool"] * (
        len(results)), "user"]  # fmt: skip
    assert info["messages"][-1]["content"] == "Summarise."
    assert observation.endswith("Summarise.")
    assert info["context"] == {"is_summary_requested": True}
    observation, reward, terminated, _, info = env.step("<think>hm</think> ada <answer>x</answer>")
    assert (reward, terminated) == (0.0, False)
    assert info["action"] == {"kind": "summary", "text": "ada <answer>x</answer>"}
    _, user = info["messages"]
    kept = "in short:\nada <answer>x</answer>"
    assert user["content"].startswith(env.unwrapped.task.question)
    assert user["content"].endswith(kept)
    assert observation == user["content"]
    num_dropped = 2 * len(results)
    reason = f"policy: the model's summary of {len(results)} turns"
    assert info["context"] == {
        "num_dropped": num_dropped, "num_shortened": 0, "reason": reason,
    }  # fmt: skip
    *_, info = env.step("hm")  # the next turns follow the summary, and the next one covers both
    assert [m["role"] for m in info["messages"]] == ["system", "user", "assistant", "user"]
    assert info["messages"][1] == user


def test_an_empty_summary_is_a_mistake():
    env = policy_env(budget_tokens=150, request="Summarise.")
    _, results = run_until_request(env)
    observation, *_, info = env.step("<think>nothing</think>")
    assert observation == info["messages"][-1]["content"] == "The summary is empty.\n\nSummarise."
    assert info["action"]["error"] == "empty_summary"
    assert info["metrics"]["num_invalid_actions"] == 1
    *_, info = env.step("found")
    assert info["context"]["num_dropped"] == 2 * len(results) + 2


def test_thresholds_are_drawn_by_the_seed_and_change_no_task():
    drawn = {}
    for seed in range(12):
        env = policy_env(budget_tokens=250, min_tokens=100)
        actions, results = run_until_request(env, seed)
        size = estimate_tokens(results[-1][4]["messages"][:-1])
        assert size > 100
        again = policy_env(budget_tokens=250, min_tokens=100)
        assert run_until_request(again, seed) == (actions, results)
        full = gym.make("AgentR1/SyntheticMultiHop-v0", hops=4)
        assert full.reset(seed=seed)[1]["task_id"] == results[0][4]["task_id"]
        drawn[seed] = len(results)
    assert len(set(drawn.values())) > 1


def test_a_snapshot_remembers_that_a_summary_is_requested():
    env, other = policy_env(budget_tokens=150), policy_env(budget_tokens=150)
    run_until_request(env)
    other.reset(seed=8)
    other.unwrapped.restore(env.unwrapped.snapshot())
    assert other.step("all of it") == env.step("all of it")


@pytest.mark.parametrize("shown", [None, "text", [], [{"role": "user"}], [None], {}])
def test_the_result_of_a_custom_context_is_checked(shown):
    def nonsense(_):
        return shown

    with pytest.raises(TypeError, match=r"nonsense.* returned .*; it must return a View"):
        make_view(nonsense, history(1))
    assert make_view(lambda h: View(h.messages), history(1)).reason is None


@pytest.mark.parametrize(
    "options",
    [
        {"name": "window", "turns": 0}, {"name": "window", "k": 2}, {}, [], [3], "summary",
        {"name": "summary", "summarise": 3}, {"name": "summary", "summarise": {"model": "m"}},
        {"name": "summary", "summarise": "json:dumps", "turns": 0},
        {"name": "policy", "budget_tokens": 0}, {"name": "policy", "tokens": 100},
        {"name": "policy", "budget_tokens": 100, "min_tokens": 101},
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options):
    with pytest.raises((ConfigurationError, UnknownNameError)):
        make_context(options)


def latest(history):
    """A context policy that others can import."""
    return history.messages[-2:]


class Latest:
    """The same with an option."""

    def __init__(self, count=2):
        self.count = count

    def __call__(self, history):
        return history.messages[-self.count :]


def brief(env, event):
    """A reward term that others can import."""
    return float(len(event.text) < 10)


@pytest.mark.parametrize("context", ["latest", "Latest", {"name": "Latest", "count": 2}])
def test_context_and_reward_term_may_be_import_paths_as_on_a_command_line(context):
    if isinstance(context, str):
        context = f"{__name__}:{context}"
    else:
        context = {**context, "name": f"{__name__}:{context['name']}"}
    rewards = {"exact_match": 1.0, f"{__name__}:brief": 0.5}
    env = gym.make("AgentR1/SyntheticArithmetic-v0", context=context, rewards=rewards)
    env.reset(seed=0)
    *_, info = env.step("hello")
    assert len(info["messages"]) == 2
    assert info["reward_terms"] == {"exact_match": 0.0, "brief": 0.5}
