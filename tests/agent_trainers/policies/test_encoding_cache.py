"""The memory-limited cache of encoded texts."""

from agent_trainers.policies.rendering import EncodingCache

A, B, C = "a" * 1000, "b" * 1000, "c" * 1000


def test_texts_are_encoded_once_and_the_least_recently_used_are_dropped():
    encoded = []

    def encode(text, last_id=None):
        encoded.append(text)
        return None if last_id == 0 else [7] * len(text)

    cache = EncodingCache(encode, 100_000)  # two texts with 1,000 tokens of 36 bytes, not three
    for text in (A, B, A, C, A, C, B):
        assert cache(text) == [7] * 1000
    assert encoded == [A, B, C, B]
    encoded.clear()
    assert cache("x", 0) is cache("x", 0) is None
    assert cache("x", 1) == cache("x", 1) == [7]
    assert encoded == ["x", "x"]
    long = "x" * 5000  # beyond the memory
    assert cache(long) == cache(long) == [7] * 5000
    assert encoded[2:] == [long, long]
