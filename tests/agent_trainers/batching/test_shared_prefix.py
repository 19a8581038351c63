import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_trainers.batching.shared_prefix import align, can_share, find_groups


def groups(prompts, width, pad=0):
    ids = torch.tensor(prompts)
    return find_groups(ids, (ids != pad).long(), width)


def test_rows_with_the_same_prompt_are_one_group():
    found = groups([[7, 8, 9], [7, 8, 9], [0, 8, 9], [7, 8, 9]], width=1)
    assert found.firsts == [0, 2]
    assert found.group == [0, 0, 1, 0]


def test_nothing_is_shared_where_it_saves_too_little():
    assert groups([[7, 8, 9], [7, 8, 9]], width=100) is None
    assert groups([[7, 8, 9], [7, 8, 1]], width=1) is None
    assert groups([[7], [7]], width=1) is None  # the last token goes with the completion


def test_models_that_drop_out_or_are_checkpointed_do_not_share(model):
    assert can_share(model)
    model.config.attention_dropout = 0.1
    assert not can_share(model)
    model.config.attention_dropout = 0.0
    assert can_share(model)
    model.gradient_checkpointing_enable()
    assert not can_share(model)


def rows_of(*pairs):
    """Prompts flush right, completions flush left, as `collate` makes them; odd tokens trained."""
    prompt_width = max(len(prompt) for prompt, _ in pairs)
    width = max(len(completion) for _, completion in pairs)

    def stack(make):
        return torch.tensor([make(*pair) for pair in pairs])

    return {
        "prompt_ids": stack(lambda p, c: [0] * (prompt_width - len(p)) + p),
        "prompt_mask": stack(lambda p, c: [0] * (prompt_width - len(p)) + [1] * len(p)),
        "completion_ids": stack(lambda p, c: c + [0] * (width - len(c))),
        "completion_mask": stack(lambda p, c: [1] * len(c) + [0] * (width - len(c))),
        "tool_mask": stack(lambda p, c: [t % 2 for t in c] + [0] * (width - len(c))),
    }


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 99), min_size=1, max_size=6),
            st.lists(st.integers(1, 99), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_every_token_keeps_its_place_in_its_own_row(pairs):
    aligned = align(rows_of(*pairs))
    for i, (prompt, completion) in enumerate(pairs):
        whole = prompt + completion
        assert aligned.input_ids[i, : len(whole)].tolist() == whole
        places = aligned.before[i, : len(completion)] + 1
        assert aligned.input_ids[i, places].tolist() == completion
        trained = [t % 2 for t in completion]
        assert (aligned.labels[i] != -100).nonzero().flatten().tolist() == [
            place for place, is_trained in zip(places.tolist(), trained, strict=True) if is_trained
        ]
