"""``python -m agent_envs.sandbox``: say what this machine offers (see `doctor`)."""

import sys

from agent_envs.sandbox.doctor import report

if __name__ == "__main__":
    sys.stdout.write(report() + "\n")
