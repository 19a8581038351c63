"""The papers' comparison on real questions: ``python -m benchmarks.papers_real``."""
