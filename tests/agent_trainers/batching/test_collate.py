import torch

from agent_trainers.batching.collate import collate
from agent_trainers.batching.micro_batch import select_rows
from agent_trainers.batching.rows import Row, padding_row

# two actions, an observation, two more steps
ACTIONS = [True, True, False, True, True]
LONG = Row(0, [1, 2], [3, 4, 5, 6, 7], [0, 0, 0, 1, 2], ACTIONS, ACTIONS, [-1.0] * 5)


def test_rows_are_padded_left_and_right_and_trimmed_again():
    rows = [LONG, padding_row(0)]
    batch = collate(rows, pad_token_id=0)
    assert batch["prompt_ids"].tolist() == [[1, 2], [0, 0]]
    assert batch["completion_mask"].tolist() == [[1] * 5, [1] + [0] * 4]
    assert batch["tool_mask"].sum(dim=1).tolist() == [4, 0]
    assert batch["steps"][0].tolist() == [0, 0, 0, 1, 2]
    assert batch["trajectory_lengths"].tolist() == [4, 0]
    trimmed = select_rows(batch, [1])
    assert trimmed["prompt_ids"].shape == trimmed["steps"].shape == (1, 1)
    assert trimmed["trajectory_lengths"].shape == (1,)


def test_token_ids_stay_the_integers_that_they_are():
    large = 16_777_217  # the first that float32 does not hold
    row = Row(0, [large], [large, 1], [0, 0], [True] * 2, [True] * 2, [0.0] * 2)
    batch = collate([row, padding_row(large)], pad_token_id=large)
    assert batch["prompt_ids"].tolist() == [[large], [large]]
    assert batch["completion_ids"].tolist() == [[large, 1], [large, large]]
    integers = {name for name, tensor in batch.items() if tensor.dtype == torch.int64}
    assert set(batch) - integers == {"sampling_per_token_logps"}
