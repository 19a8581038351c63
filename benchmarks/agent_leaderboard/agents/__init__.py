"""Who plays: with and without a model."""
