"""Signs of reward hacking in training runs; see `HackWatch`."""

from agent_trainers.experimental.hack_watch.hack_watch import HackWatch

__all__ = ["HackWatch"]
