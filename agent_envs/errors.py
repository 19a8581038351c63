"""The exceptions of both packages.

Each also derives from the built-in that it specialises, so ``except ValueError`` works. A model's
mistake is never an exception: it is an observation.
"""


class AgentEnvsError(Exception):
    """Base class of all exceptions of this project."""


class UnknownNameError(AgentEnvsError, KeyError):
    """An unknown name; the message suggests the nearest known one."""

    def __str__(self) -> str:
        """Return the message as written (``KeyError`` would show its ``repr``)."""
        return str(self.args[0])


class ConfigurationError(AgentEnvsError, ValueError):
    """Arguments that contradict each other or are out of range."""


class DataError(AgentEnvsError, ValueError):
    """A data source that is missing or malformed; the message names file, row and field."""


class CheckpointError(AgentEnvsError, OSError):
    """A checkpoint that cannot be written, found or used."""


class MissingExtraError(AgentEnvsError, ImportError):
    """An optional library that is not installed; the message names its extra."""


class ActionTypeError(AgentEnvsError, TypeError):
    """An action that is not a string: a programming error, not a model's mistake."""


class ConformanceError(AgentEnvsError, AssertionError):
    """An environment that breaks the contract; one line for each failed check."""


class SnapshotError(AgentEnvsError, ValueError):
    """A state that cannot be saved or restored; names the attribute or argument."""


class ReplayError(SnapshotError):
    """Recorded actions that lead to another state than the recorded one; names the step."""


class ServerError(AgentEnvsError, RuntimeError):
    """A server of models or environments that failed; names its URL and its error."""


class RolloutError(AgentEnvsError, RuntimeError):
    """Most episodes fail because of the infrastructure; the message holds the first error."""


class SandboxError(AgentEnvsError, RuntimeError):
    """A sandbox failed; a failure of its program is a result instead."""


class SandboxUnavailableError(SandboxError):
    """The machine does not support a level of isolation; the message holds the fix."""
