"""What the algorithms and the environments achieve, measured; run from the repository's root."""
