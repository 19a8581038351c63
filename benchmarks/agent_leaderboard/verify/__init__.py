"""Checking a run by playing it again."""
