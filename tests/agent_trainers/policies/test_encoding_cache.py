"""What was encoded lately is known, within so much memory."""

import pytest

from agent_trainers.policies.rendering import EncodingCache


@pytest.fixture
def encoded():
    """What was encoded, in order."""
    return []


@pytest.fixture
def cache(encoded):
    """Has room for two texts with 1,000 tokens each, of 36 bytes, and not for three."""

    def encode(text, last_id=None):
        encoded.append(text)
        return None if last_id == 0 else [7] * len(text)

    return EncodingCache(encode, 100_000)


A, B, C = "a" * 1000, "b" * 1000, "c" * 1000


def test_a_text_is_encoded_once_for_what_else_is_given(cache, encoded):
    assert cache(A) == cache(A) == [7] * 1000
    assert cache("x", 0) is cache("x", 0) is None
    assert cache("x", 1) == cache("x", 1) == [7]
    assert encoded == [A, "x", "x"]


def test_what_nobody_asked_for_longest_is_forgotten_first(cache, encoded):
    for text in (A, B, A, C, A, C, B):
        cache(text)
    assert encoded == [A, B, C, B]


def test_a_text_beyond_the_memory_is_encoded_and_not_kept(cache, encoded):
    long = "x" * 5000
    assert cache(long) == cache(long) == [7] * 5000
    assert encoded == [long, long]
    cache(A), cache(B), cache(A), cache(B)
    assert encoded[2:] == [A, B]
