from dataclasses import replace

import numpy as np
import pytest

from agent_trainers.batching.per_token import DENOMINATORS, loss_weights
from agent_trainers.batching.rows import make_rows
from agent_trainers.trajectory import StopReason
from tests.agent_trainers.made import trajectory, transition


def step(prompt_ids, completion_ids):
    logprobs = np.arange(len(completion_ids), dtype=np.float32)
    return transition(prompt_ids, completion_ids, logprobs=logprobs)


EXTENDING = trajectory(
    step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]), step([1, 2, 3, 4, 5, 6], [7])
)


def test_steps_that_extend_each_other_become_one_row():
    (row,) = make_rows(EXTENDING, 3)
    assert row.episode == 3
    assert row.prompt_ids == [1, 2]
    assert row.completion_ids == [3, 4, 5, 6, 7]
    assert row.is_action == row.is_trained == [True, True, False, True, True]
    assert row.steps == [0, 0, 0, 1, 2]
    assert row.logprobs == [0.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "prompt_ids", [[1, 9, 3, 4, 5], [1, 2, 3], [1, 2, 3, 9, 5], [3, 4, 5], [1, 2]]
)
def test_a_state_that_does_not_extend_the_last_begins_a_new_row(prompt_ids):
    rows = make_rows(trajectory(step([1, 2], [3, 4]), step(prompt_ids, [6])))
    assert [row.prompt_ids for row in rows] == [[1, 2], prompt_ids]


def test_a_turn_that_was_cut_off_can_be_left_untrained():
    cut = trajectory(*EXTENDING.transitions, stop_reason=StopReason.TOKEN_LIMIT)
    (row,) = make_rows(cut, train_truncated=False)
    assert row.is_trained == [True, True, False, True, False]
    assert row.is_action == [True, True, False, True, True]
    first, *others = EXTENDING.transitions
    cut = replace(first, info={"finish_reason": "length"})  # a program went on after it
    (row,) = make_rows(trajectory(cut, *others), train_truncated=False)
    assert row.is_trained == [False, False, False, True, True]


def test_weights_share_out_what_counts_as_one():
    long, short = EXTENDING, trajectory(step([1], [2, 3]))
    rows = [*make_rows(long, 0, merge=False), *make_rows(short, 1)]

    def weights(denominator):
        return [w.tolist() for w in loss_weights(rows, denominator)]

    assert weights("token") == [[1, 1], [1], [1], [1, 1]]
    assert weights("step") == [[0.5, 0.5], [1], [1], [0.5, 0.5]]
    assert weights("trajectory") == [[0.25, 0.25], [0.25], [0.25], [0.5, 0.5]]


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_weights_are_the_same_for_merged_rows(denominator):
    (merged,) = loss_weights(make_rows(EXTENDING), denominator)
    separate = loss_weights(make_rows(EXTENDING, merge=False), denominator)
    assert merged[[0, 1, 3, 4]].tolist() == np.concatenate(separate).tolist()
    assert merged[2] == 0.0
