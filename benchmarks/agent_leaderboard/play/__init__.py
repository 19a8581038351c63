"""Running agents, and replaying their episodes."""
