"""Gymnasium wrappers."""
