"""Environments, one module per family."""
