"""branching."""
