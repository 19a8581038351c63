"""What brings another session to where an episode is."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(slots=True)
class Journal:
    """The messages an episode is made of, and the last snapshot that a server made of it."""

    origin: Message
    """What it begins with, whatever was before: a reset with a seed, or a snapshot to restore."""
    later: list[Message] = field(default_factory=list)
    """What was sent since then."""
    snapshot: str | None = None
    """The last one, sealed."""
    num_included: int = 0
    """How many of `later` it includes."""
    last_seen: str = ""
    """A digest of the last reply."""

    def note(self, message: Message, reply: Mapping[str, Any]) -> None:
        """Note a message that was carried out; for `origin`, its reply alone."""
        if message is not self.origin:
            self.later.append(message)
        self.last_seen = digest(reply)
        if (snapshot := reply["observation"].get("snapshot")) is not None:
            self.snapshot, self.num_included = snapshot, len(self.later)

    def followed_by(self, reset: Message, turn_limit: int | None) -> "Journal":
        """Return the journal of an episode whose reset needs the state in which this one ended.

        That is one without a seed: the generator goes on.
        """
        if self.snapshot is None or self.num_included < len(self.later):
            return self
        return Journal(restoring(self.snapshot, turn_limit), snapshot=self.snapshot)

    def ways_back(self, turn_limit: int | None) -> Iterator[list[Message]]:
        """Yield the messages that lead to where the episode is, the shortest way first.

        The second is for a server that cannot open the snapshot.
        """
        if self.snapshot is not None:
            yield [restoring(self.snapshot, turn_limit), *self.later[self.num_included :]]
        yield [self.origin, *self.later]


def restoring(snapshot: str, turn_limit: int | None) -> Message:
    """Return the message that lets a session go on from a snapshot."""
    return {"type": "restore", "data": {"snapshot": snapshot, "turn_limit": turn_limit}}


def digest(reply: Mapping[str, Any]) -> str:
    """Return what tells two observations apart; how they are sealed does not count."""
    observation = {k: v for k, v in reply["observation"].items() if k != "snapshot"}
    text = json.dumps([observation, reply["reward"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
