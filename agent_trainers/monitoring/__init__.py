"""Metrics, curves and pages of a run."""
