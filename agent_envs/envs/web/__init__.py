"""Web shopping."""
