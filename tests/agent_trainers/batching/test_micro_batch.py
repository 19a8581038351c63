import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_trainers.batching.collate import collate
from agent_trainers.batching.micro_batch import pick_rows, select_rows, split_into_micro_batches
from agent_trainers.batching.rows import Row


def batch_of(*completions):
    def row(i, ids):
        flags = [True] * len(ids)
        return Row(i, [1, 2], list(ids), [0] * len(ids), flags, flags, [0.0] * len(ids))

    return collate([row(i, ids) for i, ids in enumerate(completions)], 0)


def test_equal_rows_are_forwarded_once_and_their_values_expanded():
    micro_batch = select_rows(batch_of([5, 6], [7], [5, 6]), [0, 1, 2])
    assert micro_batch.forwarded["completion_ids"].tolist() == [[5, 6], [7, 0]]
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert micro_batch.expand(values).tolist() == [[1.0, 2.0], [3.0, 0.0], [1.0, 2.0]]
    assert micro_batch["completion_ids"].tolist() == [[5, 6], [7, 0], [5, 6]]


def test_a_micro_batch_without_rows_weighs_nothing():
    batch = batch_of([5], [7]) | {"loss_weights": torch.ones(2, 1)}
    assert select_rows(batch, [])["loss_weights"].tolist() == [[0.0]]


@settings(deadline=None)
@given(
    completions=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1),
    max_tokens=st.integers(1, 60),
)
def test_micro_batches_hold_every_row_once_and_equal_rows_together(completions, max_tokens):
    batch = batch_of(*completions)
    parts = split_into_micro_batches(batch, max_rows=1, max_tokens=max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(completions)))
    for part in parts:
        inside = {tuple(completions[i]) for i in part}
        assert all(i in part for i, ids in enumerate(completions) if tuple(ids) in inside)
        tokens = select_rows(batch, part).forwarded["completion_ids"].numel() + 2 * len(inside)
        assert tokens <= max_tokens or len(inside) == 1


def test_gradients_of_rows_picked_often_add_up_to_the_same_bits_every_time():
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(3, 20_000, generator=generator, requires_grad=True)
        weights = torch.randn(64, 20_000, generator=generator)
        rows = [i % 3 for i in range(64)]
        gradients = [
            torch.autograd.grad((pick_rows(values, rows) * weights).sum(), values)[0]
            for _ in range(5)
        ]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
