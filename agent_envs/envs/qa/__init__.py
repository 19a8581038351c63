"""Questions whose answers are searched for."""
