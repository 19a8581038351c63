"""Verification of runs by replay."""
