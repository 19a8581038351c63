"""What a result may claim to have cost."""

from types import SimpleNamespace

from agent_leaderboard.verify.claims import check_tokens

OPENS = '<tool_call>{"name": "search", "arguments": {"query": " '
"""One token of the embedded policy's."""


def problems(num_tokens, **agent):
    usage = SimpleNamespace(calls=1, prompt_tokens=100, completion_tokens=num_tokens)
    record = SimpleNamespace(kind="checkpoint", **agent)
    return list(check_tokens(SimpleNamespace(usage=usage), record, OPENS * 20, "who ?"))


def test_a_trained_policy_is_counted_by_the_tokenizer_of_what_it_began_with():
    trained = {"model": "my-run", "train": {"num_eval_tasks": 0}}
    assert problems(20, **trained) == []
    assert problems(10, **trained) != []


def test_a_model_that_is_not_at_hand_is_held_to_a_bound():
    assert problems(20, model="my-run", train=None) != []
    assert problems(20 * len(OPENS), model="my-run", train=None) == []
