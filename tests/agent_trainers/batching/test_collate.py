import pytest
import torch

from agent_trainers.batching.collate import collate, num_rows_per_process, trim
from agent_trainers.batching.rows import Row, padding_row

# two actions, an observation, two more steps
ACTIONS = [True, True, False, True, True]
LONG = Row(0, [1, 2], [3, 4, 5, 6, 7], [0, 0, 0, 1, 2], ACTIONS, ACTIONS, [-1.0] * 5)


@pytest.mark.parametrize(
    ("num_rows", "num_splits", "expected"),
    [([3, 5], 1, 5), ([3, 5], 2, 6), ([0, 0], 4, 4), ([8], 4, 8), ([1, 9], 4, 12)],
)
def test_processes_hold_equal_rows_that_split_evenly(num_rows, num_splits, expected):
    assert num_rows_per_process(num_rows, num_splits) == expected


def test_rows_are_padded_left_and_right_and_trimmed_again():
    rows = [LONG, padding_row(0)]
    batch = collate(rows, pad_token_id=0, pad_to_multiple_of=4)
    assert batch["prompt_ids"].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert batch["completion_mask"].tolist() == [[1] * 5 + [0] * 3, [1] + [0] * 7]
    assert batch["tool_mask"].sum(dim=1).tolist() == [4, 0]
    assert batch["steps"][0].tolist() == [0, 0, 0, 1, 2, 0, 0, 0]
    assert batch["trajectory_lengths"].tolist() == [4, 0]
    trimmed = trim(batch | {"number": torch.tensor(4)})
    assert trimmed["prompt_ids"].shape == (2, 2)
    assert trimmed["steps"].shape == (2, 5)
    assert trimmed["trajectory_lengths"].shape == (2,)
    assert trimmed["number"] == 4


def test_token_ids_stay_the_integers_that_they_are():
    large = 16_777_217  # the first that float32 does not hold
    row = Row(0, [large], [large, 1], [0, 0], [True] * 2, [True] * 2, [0.0] * 2)
    batch = collate([row, padding_row(large)], pad_token_id=large)
    assert batch["prompt_ids"].tolist() == [[large], [large]]
    assert batch["completion_ids"].tolist() == [[large, 1], [large, large]]
    integers = {name for name, tensor in batch.items() if tensor.dtype == torch.int64}
    assert set(batch) - integers == {"sampling_per_token_logps"}
