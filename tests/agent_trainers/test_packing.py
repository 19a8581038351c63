from hypothesis import given
from hypothesis import strategies as st

from agent_trainers.packing import pack


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
