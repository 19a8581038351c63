"""Signs of reward hacking in training runs; see `HackWatch`."""

from agent_trainers.experimental.hack_watch.watch import HackWatch

__all__ = ["HackWatch"]
