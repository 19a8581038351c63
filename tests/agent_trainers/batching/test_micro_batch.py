import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_trainers.batching.micro_batch import cut, take
from agent_trainers.batching.rows import Row, collate


def batch_of(*completions):
    def row(i, ids):
        flags = [True] * len(ids)
        return Row(i, [1, 2], list(ids), [0] * len(ids), flags, flags, [0.0] * len(ids))

    return collate([row(i, ids) for i, ids in enumerate(completions)], 0)


def test_equal_rows_are_forwarded_once_and_their_values_spread():
    piece = take(batch_of([5, 6], [7], [5, 6]), [0, 1, 2])
    assert piece.forwarded["completion_ids"].tolist() == [[5, 6], [7, 0]]
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert piece.spread(values).tolist() == [[1.0, 2.0], [3.0, 0.0], [1.0, 2.0]]
    assert piece["completion_ids"].tolist() == [[5, 6], [7, 0], [5, 6]]


def test_rows_that_differ_are_left_as_they_are():
    piece = take(batch_of([5], [7]), [1, 0])
    assert piece.copies is None
    assert piece.forwarded["completion_ids"].tolist() == [[7], [5]]


def test_a_piece_is_narrowed_to_its_rows():
    piece = take(batch_of([5, 6, 7], [8]), [1])
    assert piece["completion_ids"].shape == (1, 1)


def test_a_piece_without_rows_weighs_nothing():
    batch = batch_of([5], [7]) | {"loss_weights": torch.ones(2, 1)}
    assert take(batch, [])["loss_weights"].tolist() == [[0.0]]


@given(
    completions=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1),
    max_tokens=st.integers(1, 60),
)
def test_pieces_hold_every_row_once_and_equal_rows_together(completions, max_tokens):
    batch = batch_of(*completions)
    parts = cut(batch, max_rows=1, max_tokens=max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(completions)))
    for part in parts:
        inside = {tuple(completions[i]) for i in part}
        assert all(i in part for i, ids in enumerate(completions) if tuple(ids) in inside)
        tokens = take(batch, part).forwarded["completion_ids"].numel() + 2 * len(inside)
        assert tokens <= max_tokens or len(inside) == 1
