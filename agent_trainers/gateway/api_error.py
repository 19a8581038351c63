"""Errors as OpenAI's API says them, so that its client libraries raise what they should."""

from typing import Any

from agent_trainers.trajectory import StopReason


class ApiError(Exception):
    """A request that is refused, or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        stop_reason: StopReason | None = None,
    ) -> None:
        """Say what is wrong.

        Args:
            status: The HTTP status. Client libraries try 408, 409, 429, 500 and above again.
            message: One sentence, and what to do.
            param: The parameter that is refused.
            code: A short code for programs.
            stop_reason: What it means for the episode if no call succeeds after it; None if it is
                the program's own mistake.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.stop_reason = stop_reason

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def refusal(param: str, message: str) -> ApiError:
    """Return the refusal of a parameter."""
    return ApiError(400, message, param=param, code="unsupported_parameter")
