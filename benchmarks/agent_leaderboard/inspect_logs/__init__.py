"""Logs of inspect_ai, out and in."""
