"""The reference manifest: what a run has to measure to be compared with the published one.

A run can be true in every line and yet choose its tasks, its seed or its data. Whether it did says
this comparison: with `PUBLISHED`, which comes with the package, or with a reference of one's own.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent_leaderboard.records.manifest import (
    FORMAT_VERSION,
    AgentRecord,
    EnvironmentRecord,
    Manifest,
    Protocol,
    check_version,
)
from agent_leaderboard.records.names import is_same_name, look
from agent_leaderboard.records.reading import Record, parse_json, read_text, validated

PUBLISHED: Final = Path(__file__).parent.parent / "references" / "published.json"
OF_THE_MEASURE: Final = ("seed", "samples_per_task", "temperature")
"""Fields of the protocol that change what is measured; others change how fast, and how often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference(Record):
    """Protocol and environments of a run; tasks and data by their digests."""

    format_version: int
    protocol: Protocol
    environments: list[EnvironmentRecord]
    agents: dict[str, str] = field(default_factory=dict)
    """Names that are on the board, and the kind of each."""

    def taken_names(self, agents: Iterable[AgentRecord]) -> Iterator[str]:
        """Yield agents that are named as others on the board are, or look like it."""
        board = {look(name): (name, kind) for name, kind in self.agents.items()}
        for agent in agents:
            name, kind = board.get(look(agent.name), (agent.name, agent.kind))
            if kind != agent.kind or not is_same_name(name, agent.name):
                yield (
                    f"agent {agent.slug!r}, field 'name': {agent.name!a} looks like "
                    f"{name!a}, an agent on the board; write another name"
                )

    def differences(self, protocol: Protocol, environment: EnvironmentRecord) -> list[str]:
        """Return what a run measures otherwise in an environment."""
        same = [one for one in self.environments if one.slug == environment.slug]
        if not same:
            return ["the reference has no such environment"]
        return [
            *measured_otherwise(protocol, self.protocol, OF_THE_MEASURE),
            *measured_otherwise(environment, same[0]),
        ]

    def has_data(self, environment: EnvironmentRecord) -> bool:
        """Return whether all data files of an environment are among those of the reference."""
        known = {file.sha256 for one in self.environments for file in one.data}
        return known.issuperset(file.sha256 for file in environment.data)


def measured_otherwise(
    record: object, other: object, names: tuple[str, ...] | None = None
) -> Iterator[str]:
    """Yield the fields in which two records of a kind differ."""
    for name in names or [entry.name for entry in dataclasses.fields(other)]:  # type: ignore[arg-type]  # records
        mine, theirs = getattr(record, name), getattr(other, name)
        if mine != theirs:
            short = len(f"{mine}{theirs}") < 100 and not name.endswith("sha256")
            yield f"{name} is {mine!r}, not {theirs!r}" if short else f"{name} is another one"


@functools.cache
def published() -> Reference:
    """Return the reference that comes with the package."""
    return read_reference(PUBLISHED)


def read_reference(path: Path) -> Reference:
    """Read a reference.

    Raises:
        DataError: If it cannot be read, or is of another version; names file and field.
    """
    record = parse_json(read_text(path), path)
    check_version(record, path)
    reference: Reference = validated(Reference, record, path)
    return reference


def reference_text(manifest: Manifest) -> str:
    """Return the reference that a run gives, as its file."""
    reference = Reference(
        format_version=FORMAT_VERSION,
        protocol=manifest.protocol,
        environments=manifest.environments,
        agents={agent.name: agent.kind for agent in manifest.agents},
    )
    return json.dumps(dataclasses.asdict(reference), indent=2) + "\n"
