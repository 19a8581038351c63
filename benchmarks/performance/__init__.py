"""Measurements of time and memory: each module runs with ``python -m`` and prints its results."""
