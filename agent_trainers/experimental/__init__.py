"""Experiments: they import the core, which never imports them; no promise of stability."""
