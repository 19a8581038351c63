"""The leaderboard: agents against environments, by a fixed protocol, with results that verify."""
