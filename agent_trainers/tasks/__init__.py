"""Tasks of a run: environments and which task comes next."""
