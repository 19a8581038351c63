"""Text games."""
