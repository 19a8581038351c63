"""Dialogues with a user."""
