"""Agents with and without a model."""
