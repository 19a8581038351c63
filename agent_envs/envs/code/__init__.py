"""Programming."""
