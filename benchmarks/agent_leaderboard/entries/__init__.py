"""Entering the leaderboard: template, check, submission."""
