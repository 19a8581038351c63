"""The trainers: everything that knows TRL, and nothing else does."""
