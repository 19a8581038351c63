"""``agent-r1-bench`` and ``python -m agent_leaderboard``."""

from agent_trainers.cli.commands import run


def main() -> None:
    """Run the command."""
    run("agent-r1-bench", "agent_leaderboard.cli")


if __name__ == "__main__":
    main()
