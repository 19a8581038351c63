"""Checkpoints that appear whole, and runs that end when asked to."""
