from dataclasses import replace

import numpy as np
import pytest

from agent_trainers.batching.per_token import DENOMINATORS, loss_weights, spread_over_tokens
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


def test_alternating_agents_keep_their_rows():
    main = [step([1, 2], [3]), step([1, 2, 3, 4], [5]), step([1, 2, 3, 4, 5, 6], [7])]
    other = [step([1, 9], [8]), step([1, 9, 8, 4], [5])]
    alternating = trajectory(main[0], other[0], main[1], other[1], main[2])
    first, second = make_rows(alternating)
    assert (first.prompt_ids, first.completion_ids) == ([1, 2], [3, 4, 5, 6, 7])
    assert first.steps == [0, 0, 2, 2, 4]  # an observation has the step of the action before it
    assert (second.prompt_ids, second.completion_ids) == ([1, 9], [8, 4, 5])
    assert second.steps == [1, 1, 3]


def test_a_step_joins_the_longest_row_that_it_extends():
    short, long = step([1], [2]), step([1, 2, 3], [4])
    rows = make_rows(trajectory(long, short, step([1, 2, 3, 4, 5], [6])))
    assert [row.completion_ids for row in rows] == [[4, 5, 6], [2]]


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


def test_values_of_tokens_are_in_the_order_of_steps_and_not_of_rows():
    main = [step([1, 2], [3]), step([1, 2, 3, 4], [5])]
    alternating = trajectory(main[0], step([9], [8, 7]), main[1])
    rows = make_rows(alternating)
    masks = [np.array(row.is_action) for row in rows]
    # tokens in the order of the steps: 3; 8, 7; 5
    spread = spread_over_tokens(rows, masks, [np.array([0.3, 0.8, 0.7, 0.5])], [3])
    assert [row.completion_ids for row in rows] == [[3, 4, 5], [8, 7]]
    np.testing.assert_allclose(spread[0], [0.3, 0.0, 0.5])
    np.testing.assert_allclose(spread[1], [0.8, 0.7])
