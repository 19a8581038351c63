"""From rewards to losses: pure functions."""
