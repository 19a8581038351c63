"""Benchmarks of function calling."""
