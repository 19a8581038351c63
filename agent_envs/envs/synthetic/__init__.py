"""Procedural tasks that need no data."""
