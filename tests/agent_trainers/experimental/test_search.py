from types import SimpleNamespace

import pytest

from agent_envs.errors import DataError
from agent_trainers.experimental.search import score
from tests.agent_trainers.made import trajectory, transition

TABLE = {(0,): 0.1, (0, 9): 0.2, (1,): 0.4, (1, 9): 0.7}
VALUE = SimpleNamespace(values=lambda sequences: [TABLE[tuple(s)] for s in sequences])


def step(contents, prompt_ids, info):
    messages = [{"role": "user", "content": content} for content in contents]
    return transition(prompt_ids, [9], messages=messages, info=info)


@pytest.mark.parametrize(("second", "context", "expected"), [
    # values 0.1, 0.2 of the first state and action, 0.4, 0.7 of the second
    pytest.param(["q", "a", "r"], None, 0.7, id="continues"),
    pytest.param(["r"], {"reason": "window"}, 0.7, id="rewritten"),
    # another one begins at 0.4: what it adds to it counts from 0.2 on
    pytest.param(["next"], None, 0.5, id="new conversation"),
])  # fmt: skip
def test_scores_add_up_over_conversations(second, context, expected):
    played = trajectory(step(["q"], [0], {"context": context}), step(second, [1], {}))
    assert score(played, VALUE) == pytest.approx(expected)


def test_episodes_of_a_served_model_have_no_score():
    with pytest.raises(DataError, match="no token ids"):
        score(trajectory(step(["q"], [], {})), VALUE)
