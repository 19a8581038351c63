"""What one session may ask for."""

from dataclasses import dataclass, fields

from agent_envs.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Limits of one session; beyond them calls are refused, and other sessions go on."""

    max_calls: int = 256
    """Calls that are begun; of one with ``n`` choices, each counts."""
    max_tokens: int = 1_000_000
    """Tokens that are sampled, over all calls; the last turn is cut off there."""
    max_concurrent_calls: int = 16
    """Calls under way at once; the client's library tries again later."""
    max_body_bytes: int = 8_000_000
    """Size of one request."""
    call_timeout_seconds: float = 600.0
    """How long one call may take."""
    timeout_seconds: float = 3_600.0
    """How long the session may last: then its calls end, and it counts as failed."""

    def __post_init__(self) -> None:
        """Check that each is positive."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigurationError(
                    f"{field.name} ({getattr(self, field.name)}) must be positive."
                )
