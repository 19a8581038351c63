from types import SimpleNamespace

import pytest

from agent_envs.errors import DataError
from agent_trainers import TINY_POLICY
from agent_trainers.experimental import search
from agent_trainers.experimental.search import score
from agent_trainers.trajectory import save_trajectories
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


def test_attempts_are_those_of_a_task_of_one_environment(tmp_path, monkeypatch, capsys):
    played = [
        trajectory(transition(), env=env, metrics={"success": success})
        for env, success in (("a", 1.0), ("b", 0.0))
    ]
    save_trajectories(tmp_path / "played.jsonl", played)
    monkeypatch.setattr(search.ProcessValue, "load", lambda _: None)
    monkeypatch.setattr(search, "score", lambda trajectory, value: 0.0)
    search.run([str(tmp_path / "played.jsonl"), "--value", str(TINY_POLICY)])
    assert "oracle_best_of  success 0.500" in capsys.readouterr().out
