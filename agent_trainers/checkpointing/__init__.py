"""Checkpoints that are complete or absent."""
