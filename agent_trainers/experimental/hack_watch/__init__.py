"""hack_watch."""
