"""Measurements of algorithms and environments; run from the repository's root."""
