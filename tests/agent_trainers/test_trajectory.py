import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_envs import DataError
from agent_trainers.trajectory import (
    StopReason,
    Trajectory,
    Transition,
    load_trajectories,
    save_trajectories,
)
from tests.agent_trainers.made import trajectory, transition

TEXTS = st.text(st.characters(), max_size=20)  # lone surrogates included
NUMBERS = st.floats(allow_nan=False)
IDS = st.lists(st.integers(0, 200_000), max_size=5)


@st.composite
def transitions(draw):
    completion_ids = draw(IDS)
    width = st.floats(width=32, allow_nan=False)
    return Transition(
        messages=[{"role": "user", "content": draw(TEXTS)}],
        prompt_ids=draw(IDS),
        completion_ids=completion_ids,
        logprobs=np.array([draw(width) for _ in completion_ids], np.float32),
        action=draw(TEXTS),
        reward=draw(NUMBERS),
        reward_terms=draw(st.dictionaries(TEXTS, NUMBERS, max_size=2)),
        terminated=draw(st.booleans()),
        truncated=draw(st.booleans()),
        info={"action": {"kind": draw(TEXTS)}, "deep": [1, None, {"x": draw(NUMBERS)}]},
    )


TRAJECTORIES = st.builds(
    Trajectory,
    task_id=TEXTS,
    group_id=TEXTS,
    transitions=st.lists(transitions(), max_size=3),
    metrics=st.dictionaries(TEXTS, NUMBERS, max_size=2),
    timings=st.dictionaries(TEXTS, NUMBERS, max_size=2),
    stop_reason=st.sampled_from(StopReason),
    error=st.none() | TEXTS,
)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None
)
@given(trajectories=st.lists(TRAJECTORIES, max_size=3))
def test_what_was_written_is_read_back_bit_by_bit(tmp_path, suffix, trajectories):
    path = tmp_path / f"trajectories.{suffix}"
    save_trajectories(path, trajectories)
    loaded = load_trajectories(path)
    assert loaded == trajectories
    for one, other in zip(loaded, trajectories, strict=True):
        for a, b in zip(one.transitions, other.transitions, strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
            assert a.logprobs.dtype == np.float32


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_keys_that_json_cannot_hold_are_saved_as_text(tmp_path, suffix):
    board = [{(0, 1): "x"}, {np.int64(3): 1}, {1: 2, "a": 3, None: 4}, {10: 1, 9: 2}]
    played = trajectory(transition(info={"board": board}))
    save_trajectories(tmp_path / f"x.{suffix}", [played])
    (loaded,) = load_trajectories(tmp_path / f"x.{suffix}")
    as_text = [{"(0, 1)": "x"}, {"3": 1}, {"1": 2, "a": 3, "null": 4}, {"10": 1, "9": 2}]
    assert loaded.transitions[0].info == {"board": as_text}
    assert loaded == played


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    save_trajectories(path, [trajectory(transition())])
    before = path.read_bytes()

    def broken():
        yield trajectory(transition())
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        save_trajectories(path, broken())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_another_file_or_row_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"task_id": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.jsonl, row 1: not a trajectory"):
        load_trajectories(path)
    with pytest.raises(DataError, match="unknown kind of file"):
        save_trajectories(tmp_path / "x.csv", [])


@pytest.mark.parametrize(("field", "value", "message"), [
    ("completion_ids", "abc", "transitions.0.completion_ids: Input should be a valid list"),
    ("completion_ids", [-1], "transitions.0.completion_ids.0: Input should be greater than"),
    ("logprobs", [0.5, 0.5], "one number per token"),
    ("messages", [], "transitions.0.messages: List should have at least 1 item"),
    ("messages", [{"content": "x"}], "transitions.0.messages.0.role: Field required"),
    ("action", 7, "transitions.0.action: Input should be a valid string"),
    ("reward", "much", "transitions.0.reward.float: Input should be a valid number"),
])  # fmt: skip
def test_a_step_of_another_type_is_refused(tmp_path, field, value, message):
    path = tmp_path / "x.jsonl"
    save_trajectories(path, [trajectory(transition())])
    record = json.loads(path.read_text())
    record["transitions"][0][field] = value
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=f"x.jsonl, row 1: not a trajectory.*{message}"):
        load_trajectories(path)


def test_states_are_equal_if_task_actions_and_messages_are():
    question, answer = ({"role": "user", "content": text} for text in ("Who?", "next"))

    def states(first_action, *, rewritten=False, task_id="t"):
        later = [question, {"role": "assistant", "content": first_action}, answer]
        later = later[1:] if rewritten else later
        steps = [([question], first_action), (later, "b"), ([*later, answer], "c")]
        made_steps = [transition(messages=messages, action=a) for messages, a in steps]
        return trajectory(*made_steps, task_id=task_id).states

    right, wrong = states("right"), states("wrong")
    assert right == states("right")
    assert right[0] == wrong[0]
    assert not set(right[1:]) & set(wrong[1:])  # they differ although the last messages are equal
    assert right[1] != states("right", rewritten=True)[1]
    assert not set(right) & set(states("right", task_id="u"))
