"""``python -m benchmarks.leaderboard``."""

from benchmarks.leaderboard.cli import main

if __name__ == "__main__":
    main()
