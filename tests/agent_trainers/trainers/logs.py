"""What trainers logged, to compare."""

import pytest

_TIMES = ("time", "seconds", "per_second")


def history(trainer):
    """The log without times."""
    return [
        {name: value for name, value in entry.items() if not any(t in name for t in _TIMES)}
        for entry in trainer.state.log_history
    ]


def assert_same_history(one, other):
    """Assert that two trainers logged the same, bit by bit, but for times."""
    for entry, expected in zip(history(one), history(other), strict=True):
        assert entry == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
