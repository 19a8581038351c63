import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_trainers.batching.packing import pack, pick_rows


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=40),
    max_tokens=st.integers(1, 500),
)
def test_pieces_hold_every_row_once_and_keep_to_the_token_budget(lengths, max_tokens):
    prompts, completions = zip(*lengths, strict=True)
    pieces = pack(prompts, completions, max_rows=1, max_tokens=max_tokens)
    assert sorted(row for piece in pieces for row in piece) == list(range(len(lengths)))
    for piece in pieces:
        width = max(prompts[i] for i in piece) + max(completions[i] for i in piece)
        assert len(piece) == 1 or len(piece) * width <= max_tokens


def test_rows_of_like_length_share_a_piece_and_the_longest_come_first():
    pieces = pack([5, 5, 5, 5], [10, 90, 12, 95], max_rows=2)
    assert pieces == [[3, 1], [2, 0]]


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
