"""The same environments as another library's environments."""
