"""Playing a run."""
