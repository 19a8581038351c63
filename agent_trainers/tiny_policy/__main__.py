"""``python -m agent_trainers.tiny_policy``; see `make`."""

from agent_trainers.tiny_policy.make import main

if __name__ == "__main__":
    main()
