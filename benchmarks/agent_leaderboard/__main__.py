"""``python -m agent_leaderboard``."""

from agent_leaderboard.cli import main

if __name__ == "__main__":
    main()
