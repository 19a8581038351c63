"""Tasks in a folder, with a shell."""
