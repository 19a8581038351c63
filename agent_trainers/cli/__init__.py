"""The commands ``agent-r1-train`` and ``agent-r1-eval``."""
