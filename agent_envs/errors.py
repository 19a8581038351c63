"""The exceptions of both packages.

::

    AgentEnvsError
    ├── UnknownNameError (KeyError)      a name that no table holds; suggests the nearest one
    ├── ConfigurationError (ValueError)  arguments that contradict each other or make no sense
    ├── DataError (ValueError)           a source of tasks or passages that cannot be read
    ├── CheckpointError (OSError)        a checkpoint that cannot be written, found or used
    ├── MissingExtraError (ImportError)  an optional library that is not installed
    ├── ActionTypeError (TypeError)      an action that is not text
    ├── ConformanceError (AssertionError)  an environment that breaks the contract; from the kit
    ├── SnapshotError (ValueError)       a state that cannot be saved, or restored here
    │   └── ReplayError                  recorded actions that lead to another state here
    ├── ServerError (RuntimeError)       a model's server that failed, after all retries
    ├── RolloutError (RuntimeError)      episodes that fail through no fault of the model
    └── SandboxError (RuntimeError)      a sandbox that broke, through no fault of its program
        └── SandboxUnavailableError      a level of isolation that this machine does not offer

Each also derives from the built-in it specialises, so ``except ValueError`` still works. A model's
bad output is never one of these: it is an observation.
"""


class AgentEnvsError(Exception):
    """Base of every exception that this project raises on purpose."""


class UnknownNameError(AgentEnvsError, KeyError):
    """A name that is not in its table; the message lists what is."""

    def __str__(self) -> str:
        """Return the message as written (``KeyError`` would show its ``repr``)."""
        return str(self.args[0])


class ConfigurationError(AgentEnvsError, ValueError):
    """Arguments that contradict each other or are out of range."""


class DataError(AgentEnvsError, ValueError):
    """A data source that is missing or malformed; the message names file, row and field."""


class CheckpointError(AgentEnvsError, OSError):
    """A checkpoint that cannot be written, found or used; the message says what is safe."""


class MissingExtraError(AgentEnvsError, ImportError):
    """An optional library that is not installed; the message says which extra brings it."""


class ActionTypeError(AgentEnvsError, TypeError):
    """An action that is not a string: a programming error, not a model's mistake."""


class ConformanceError(AgentEnvsError, AssertionError):
    """An environment that does not keep the contract; one line for each check that failed."""


class SnapshotError(AgentEnvsError, ValueError):
    """A state that cannot be saved, or not be restored here; names the attribute or argument."""


class ReplayError(SnapshotError):
    """Recorded actions that lead to another state than the recorded one; names the step."""


class ServerError(AgentEnvsError, RuntimeError):
    """A server of models or environments that failed; names its URL and what it said."""


class RolloutError(AgentEnvsError, RuntimeError):
    """Most episodes fail through no fault of the model; the message holds the first error."""


class SandboxError(AgentEnvsError, RuntimeError):
    """The machinery of a sandbox failed; what the program does wrong is a result instead."""


class SandboxUnavailableError(SandboxError):
    """The machine does not offer a level of isolation; the message says what to do about it."""
