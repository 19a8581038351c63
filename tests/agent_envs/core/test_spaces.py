import copy
import gc
import tempfile
from pathlib import Path

import gymnasium as gym
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_envs.core.spaces import SharedTexts, UnicodeText

NAME = "AgentR1/SyntheticMultiHop-v0"
TEXTS = st.text(st.characters(codec=None), max_size=50)


# Python 3.12 on warns of fork beside threads; Gymnasium's default is Python's.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_gymnasiums_asynchronous_environment_works_with_its_defaults():
    both = [gym.make_vec(NAME, num_envs=2, vectorization_mode=m) for m in ("async", "sync")]
    results = [envs.reset(seed=3)[0] for envs in both]
    assert results[0] == results[1]
    results = [envs.step(["no action", "<answer>x</answer>"]) for envs in both]
    assert results[0][0] == results[1][0]
    assert isinstance(results[0][0], tuple)
    held = copy.deepcopy(results[0][0])
    both[0].step(["<answer>x</answer>", "no action"])
    assert results[0][0] == held
    for envs in both:
        envs.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), TEXTS)))
def test_a_shared_text_is_the_last_that_was_written(written):
    shared, expected = SharedTexts(4, 50), [""] * 4
    for index, text in written:
        shared.write(index, text)
        expected[index] = text
        assert list(shared) == expected
    assert copy.deepcopy(shared) == tuple(expected)
    assert shared[-1] == expected[-1]


def test_a_text_that_is_too_long_touches_no_other():
    shared = SharedTexts(2, 5)
    shared.write(1, "other")
    with pytest.raises(ValueError, match="longer than its space allows"):
        shared.write(0, "x" * 21)
    assert shared[:] == ("", "other")


def test_the_file_behind_shared_texts_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = SharedTexts(64, UnicodeText().max_length)
    shared.write(63, "last")
    assert shared[63] == "last"
    (path,) = Path(tmp_path).iterdir()
    assert path.stat().st_blocks * 512 < 1_000_000  # of 2.6 GB that could be written
    del shared
    gc.collect()
    assert not path.exists()
