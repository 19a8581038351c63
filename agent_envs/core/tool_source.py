"""Tools that come from elsewhere, such as a server: each environment has a session of its own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from agent_envs.core.tool import Tool

RESERVED_NAMES: Final = frozenset({"answer", "think", "tool_call", "tool_response", "tools"})
"""What the tool formats write themselves."""


class ToolSession(Protocol):
    """What an environment has of a source."""

    @property
    def tools(self) -> Sequence[Tool]:
        """The tools that it offers now; another object where they have changed."""

    def begin_episode(self) -> None:
        """Begin without what the last episode changed."""

    def close(self) -> None:
        """End it; another episode may begin all the same."""


@runtime_checkable
class ToolSource(Protocol):
    """Where tools come from; ``tools=[...]`` takes it beside tools."""

    def open(self) -> ToolSession:
        """Begin a session."""


class ToolSessions:
    """The sessions of an environment."""

    def __init__(self, sources: Iterable[ToolSource]) -> None:
        """Open each of `sources`."""
        self._sessions = [source.open() for source in sources]
        self._offered: list[Any] = []

    @property
    def have_changed(self) -> bool:
        """Whether they offer other tools than `add_to` has added."""
        now = [session.tools for session in self._sessions]
        return any(a is not b for a, b in zip(now, self._offered, strict=True))

    def begin_episode(self) -> None:
        """Begin without what the last episode changed."""
        for session in self._sessions:
            session.begin_episode()

    def add_to(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """Return `tools` and those of the sessions; none of these takes another one's place."""
        self._offered = [session.tools for session in self._sessions]
        offered = dict(tools)
        for tool in (tool for tools in self._offered for tool in tools):
            name, number = tool.name, 1
            while name in offered or name in RESERVED_NAMES:
                number += 1
                name = f"{tool.name}_{number}"
            offered[name] = tool if name == tool.name else tool.renamed(name)
        return offered

    def close(self) -> None:
        """End all."""
        for session in self._sessions:
            session.close()
