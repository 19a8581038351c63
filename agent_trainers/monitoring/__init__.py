"""What is reported of a run, and how it looks."""
