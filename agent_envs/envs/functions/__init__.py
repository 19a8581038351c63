"""Function calling."""
