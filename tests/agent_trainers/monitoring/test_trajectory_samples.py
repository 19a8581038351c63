from dataclasses import replace

import numpy as np
import pytest
import torch

from agent_trainers.batching.collate import collate
from agent_trainers.batching.rows import make_rows
from agent_trainers.monitoring.trajectory_samples import (
    BatchRecord,
    choose,
    siblings,
    state_change,
    step_tokens,
)
from tests.agent_trainers.made import trajectory, transition

ASK = {"role": "user", "content": "Who?"}
CALL = {"role": "assistant", "content": "search a"}
FOUND = {"role": "tool", "name": "search", "content": "a is b"}
AGAIN = {"role": "assistant", "content": "search b"}
MORE = {"role": "tool", "name": "search", "content": "b is c \ud800"}


def step(messages, prompt_ids, completion_ids, action, **changes):
    settings = {
        "messages": messages, "action": action, "reward_terms": {"format": 0.25},
        "logprobs": np.full(len(completion_ids), -1.0, np.float32),
        "info": {"action": {"kind": "tool_call", "name": "search"}},
    }  # fmt: skip
    return transition(prompt_ids, completion_ids, 0.25, **(settings | changes))


@pytest.fixture
def played():
    """Two steps that extend each other; the third state is the question and the last turn."""
    drop = {"context": {"reason": "window: the last 1 turns", "num_dropped": 2},
            "action": {"kind": "tool_call", "name": "search"}}  # fmt: skip
    return trajectory(
        step([ASK], [1, 2], [3, 4], "search a"),
        step([ASK, CALL, FOUND], [1, 2, 3, 4, 5], [6], "search b", info=drop),
        step([ASK, AGAIN, MORE], [1, 2, 6, 7], [8, 9], "c", info={}, terminated=True),
        task_id="task", metrics={"success": 1.0}, step_seconds=[0.1, 0.2, 0.3],
    )  # fmt: skip


@pytest.fixture
def record(played):
    rows = make_rows(played)
    tensors = collate(rows, 0)
    shape = tensors["completion_ids"].shape  # (2, 4): 3 4 5 6 and 8 9
    tensors["advantages"] = torch.arange(shape.numel(), dtype=torch.float32).reshape(shape)
    return BatchRecord(trajectories=[played], rows=rows, tensors=tensors)


STUB = {**FOUND, "content": "[left out]"}


@pytest.mark.parametrize(
    ("step", "changes", "added", "dropped"),
    [
        pytest.param(0, {}, [ASK], [], id="the first"),
        pytest.param(1, {}, [FOUND], [], id="extends the last"),
        pytest.param(2, {}, [MORE], [CALL, FOUND], id="turns were dropped"),
        pytest.param(
            2, {"messages": [ASK, CALL, STUB, AGAIN, MORE]}, [STUB, MORE], [FOUND], id="shortened"
        ),
        pytest.param(
            2,
            {"messages": [ASK, AGAIN, FOUND, AGAIN, FOUND]},
            [FOUND],
            [],
            id="the same words again",
        ),
    ],
)
def test_a_step_shows_what_its_state_gained_and_lost(played, step, changes, added, dropped):
    first, second, third = played.transitions
    if dropped == [] and changes:
        second = replace(second, messages=[ASK, AGAIN, FOUND])
    changed = replace(played, transitions=[first, second, replace(third, **changes)])
    assert state_change(changed, step) == (added, dropped)


def test_step_tokens_take_their_numbers_from_their_place_in_the_merged_rows(record):
    # rows: tokens 3 4 | 5 observed | 6, and 8 9; advantages 0 1 2 3 and 4 5 (6 7 are padding)
    new = np.full((2, 4), -1.0)
    new[0, 3] += np.log(1.5)
    first, second, third = step_tokens(record, 0, new)
    assert (first.row, second.row, third.row) == (0, 0, 1)
    assert (first.advantages, second.advantages, third.advantages) == ([0, 1], [3], [4, 5])
    assert second.ratios == pytest.approx([1.5])
    assert third.ratios == pytest.approx([1.0, 1.0])
    assert first.values is None
    assert third.is_trained == [True, True]
    reasons = [s.fork_reason for s in (first, second, third)]
    assert reasons == [None, None, "window: the last 1 turns"]
    record.tensors["old_values"] = record.tensors["advantages"] + 10  # of a critic
    steps = step_tokens(record, 0)
    assert [s.values for s in steps] == [[10, 11], [13], [14, 15]]
    assert steps[0].ratios is None


def test_a_turn_without_tokens_has_nothing_trained(played):
    empty = replace(played.transitions[2], completion_ids=[], logprobs=np.zeros(0, np.float32))
    cut = replace(played, transitions=[*played.transitions[:2], empty])
    rows = make_rows(cut)
    made = BatchRecord(trajectories=[cut], rows=rows, tensors=collate(rows, 0))
    assert step_tokens(made, 0)[2].advantages == []


def test_failures_and_successes_of_different_groups_come_first(played):
    def episode(group, success):
        return replace(played, group_id=group, metrics={"success": success})

    batch = [episode("a", 0), episode("a", 0), episode("a", 1), episode("b", 0), episode("b", 1)]
    # failures: a's first, b's first, a's second; successes: b's second member, a's third
    assert choose(batch, 3) == [0, 4, 3]
    assert sorted(choose(batch, 99)) == [0, 1, 2, 3, 4]
    assert choose([], 4) == []


def test_the_group_that_differs_most_is_shown_whole():
    made = [trajectory(transition(reward=r), group_id=g)
            for g, r in (("a", 0.5), ("b", 0.0), ("a", 0.5), ("b", 1.0), ("b", 0.2))]  # fmt: skip
    assert siblings(made, choose(made, 5)) == [1, 3, 4]
    assert siblings([], []) == []
